"""The process of a command: its streams and exit status, the ranks that it starts, and how they report their end."""

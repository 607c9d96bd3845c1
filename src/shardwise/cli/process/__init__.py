"""The process of a command: its streams and status, the ranks that it starts, and how they report their end."""

"""What attaches to the engine at its seams: each file is imported by what uses it, and never by the engine."""

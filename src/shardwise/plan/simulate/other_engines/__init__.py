"""The recorded step as another engine would run it: its memory and the order of its events."""

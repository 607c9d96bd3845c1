"""From recorded events to memory and time."""

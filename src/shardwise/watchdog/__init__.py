"""Hangs are named: when ranks wait for one that does not come, all of them end and say which, and what it was doing."""

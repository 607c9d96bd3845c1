"""Checkpoints of other kinds: torch DCP directories, full `.pt` files, Hugging Face directories.

Nothing here needs several ranks, and one tensor is in memory at a time.
"""

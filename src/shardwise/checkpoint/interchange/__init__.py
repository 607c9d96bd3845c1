"""Checkpoints of other kinds: torch DCP directories, full `.pt` files, Hugging Face directories.

Nothing here needs several ranks, and only a bounded part of the tensors is in memory at one time.
"""

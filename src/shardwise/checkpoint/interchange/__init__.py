"""Checkpoints of other kinds: torch DCP directories, full `.pt` files, Hugging Face directories.

Nothing here needs ranks, and nothing holds more than a bounded part of the tensors.
"""

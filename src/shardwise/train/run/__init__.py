"""A run on disk, without torch: checks before its ranks start, its directory, the lock on it, checkpoints and logs."""

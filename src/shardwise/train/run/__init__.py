"""A run on disk, without torch: the checks before its ranks start, its directory, who may write there, its logs."""

"""Shards and optimizer state that rest elsewhere than on the device between uses: in the host's memory, on disk."""

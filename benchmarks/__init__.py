"""Measurements of shardwise beside its peers, each started by one command from the repository root."""

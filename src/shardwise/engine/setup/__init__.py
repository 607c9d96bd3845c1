"""What `shard` does, once, before training: units, agreement of ranks, and what callers of a sharded module must know."""

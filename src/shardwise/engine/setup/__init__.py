"""What `shard` does, once, before training: units, agreement of ranks, what callers of a sharded module must know."""

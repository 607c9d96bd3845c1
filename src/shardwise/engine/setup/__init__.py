"""What `shard` does, once, before training, and what callers of a sharded module must know."""

"""The setup that `shard` does once, before training, and adaptations for code that uses a sharded module."""

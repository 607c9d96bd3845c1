"""Shards, gradients and optimizer state that rest in host memory or on disk between uses."""

"""The host memory or disk on which weights, gradients and optimizer state rest, and the copies to and from it."""

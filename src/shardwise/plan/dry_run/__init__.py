"""Dry runs: one rank of any world, whose kernels, allocations and collectives are recorded as events."""

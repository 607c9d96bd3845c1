"""One rank of any world, run dry: its kernels, allocations and collectives, recorded as events."""

"""One rank of any world, run dry: what it computes, allocates and sends, recorded as events."""

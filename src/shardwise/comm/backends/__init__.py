"""Other implementations of `Collectives`: gloo (pairwise) and shared memory of one host; and which to use."""

"""Implementations of `Collectives`: on streams, gloo (pairwise), shared memory of one host, dry; and which to use."""

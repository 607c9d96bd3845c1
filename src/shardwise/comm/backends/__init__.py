"""Implementations of `Collectives`: nccl, gloo (pairwise), shared memory of one host, dry; and the choice of one."""

"""Whole-matrix optimizers over sharded parameters: each matrix has one owner, which computes with all of it."""

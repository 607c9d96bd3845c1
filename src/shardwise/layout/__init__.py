"""Arithmetic on ranges of elements and on groups of ranks. Imports no torch."""

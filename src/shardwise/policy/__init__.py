"""Frozen choices: what is sharded, in which dtypes. Imports no torch."""

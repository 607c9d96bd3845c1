"""From documents to batches: the same rows at any number of ranks. Imports no torch."""

"""From documents to batches, with the same rows at any number of ranks. Imports no torch."""

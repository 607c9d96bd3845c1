"""Settings as frozen data: what is sharded, in which dtypes, where it rests. Imports no torch."""

"""Settings of `sw.shard` and of runs as frozen data, with their checks. Imports no torch."""

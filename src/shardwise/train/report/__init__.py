"""The page about a run, made from the files in its directory. Imports no torch."""

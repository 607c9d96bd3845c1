"""One rank as a process: the other ranks of the run, and signals."""

"""Files of this machine: I/O of byte ranges through and past the page cache, buffers, threads. Imports no torch."""

"""Files of this machine: byte ranges through and past the page cache, memory for them, threads. No torch."""

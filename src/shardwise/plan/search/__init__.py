"""Which configuration is best: what to try, in how many processes."""

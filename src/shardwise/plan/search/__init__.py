"""The search for the best configuration: which ones to try, and in how many processes."""

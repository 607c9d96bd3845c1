"""The command line: parse arguments, start the ranks, report how they ended. It contains no training logic."""

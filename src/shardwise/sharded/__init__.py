"""The outer face of a parameter: global shape, one rank's piece, and what operations on it mean."""

"""Offload in a forecast: the bytes that a job holds on host and disk, and the time of every copy."""

"""Profiles of a run's steps: one trace of all ranks on one clock, and where the time goes."""

"""Optimizer state that is kept on disk between steps."""

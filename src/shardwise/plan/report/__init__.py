"""Answers to read: a table for a terminal, a page for a browser."""

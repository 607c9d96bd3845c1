"""Answers stored between questions."""

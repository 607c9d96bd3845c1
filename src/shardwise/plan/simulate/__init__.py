"""Simulates memory and time from recorded events."""

"""Collectives between ranks: one protocol, and implementations of torch's collectives. `backends` has others."""

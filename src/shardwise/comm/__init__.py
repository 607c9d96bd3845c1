"""Collectives between ranks: one protocol (`protocol.py`), implemented in `backends`."""

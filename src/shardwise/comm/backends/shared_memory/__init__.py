"""Collectives between ranks on one host, through shared memory."""

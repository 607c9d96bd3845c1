"""Moving bytes between ranks: one protocol (`protocol.py`) and its implementations."""

from shardwise.comm.protocol import FINISHED, Buffer, BufferKind, Collectives, Reduction, Region, Work
from shardwise.comm.select import collectives_for

__all__ = ["FINISHED", "Buffer", "BufferKind", "Collectives", "Reduction", "Region", "Work", "collectives_for"]

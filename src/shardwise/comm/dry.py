"""Collectives that communicate with no one."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.comm.buffers import PrivateBuffers, check_reductions, deliver, slice_of
from shardwise.comm.protocol import FINISHED, AllToAllPart, Buffer, Combine, FlatSpan, Reduction, Work


class DryCollectives(PrivateBuffers):
    """The collectives of one rank in a world of any size, without its peers.

    For a world of one they are complete. For a larger one shapes, dtypes and local operations are real, but the peers'
    contributions are missing, which is enough to plan with fake tensors.
    """

    name = "dry"

    def all_gather(self, buffer: Buffer, spans: tuple[FlatSpan, ...], label: int = 0) -> Work:
        """Leave the peers' slices as they are."""
        return FINISHED

    @torch.no_grad()
    def reduce_scatter(self, buffer: Buffer, reductions: tuple[Reduction, ...], label: int = 0) -> Work:
        """Deliver this rank's own term as the sum."""
        check_reductions(reductions, self.world_size)
        for r in reductions:
            deliver(slice_of(r.flat, self.rank, self.world_size), r, self._factors)
        return FINISHED

    def all_reduce(self, tensor: Tensor, op: str = "sum", after: Work = FINISHED, label: int = 0) -> Work:
        """Leave the tensor as it is."""
        return after

    def all_to_all(self, buffer: Buffer, parts: tuple[AllToAllPart, ...], into: Tensor, label: int = 0) -> Work:
        """Fill `into` with zeros."""
        into.zero_()
        return FINISHED

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Leave the tensor as it is."""

    def barrier(self) -> None:
        """Return at once."""

    def exchange(self, message: bytes, combine: Combine, label: int = 0) -> bytes:
        """Return this rank's message."""
        return message

"""Collectives that move nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.comm.buffers import PrivateBuffers, check_reductions, deliver, slice_of
from shardwise.comm.protocol import FINISHED, AllToAllPart, Buffer, Combine, FlatSpan, Reduction, Work


class DryCollectives(PrivateBuffers):
    """One rank of any world, without the others.

    For a world of one it is the real thing. For a larger one the shapes, dtypes and local operations are real and the
    peers' contributions are missing: enough for planning on fake tensors.
    """

    name = "dry"

    def all_gather(self, buffer: Buffer, spans: tuple[FlatSpan, ...], label: int = 0) -> Work:
        """Peers' slices stay as they are."""
        return FINISHED

    @torch.no_grad()
    def reduce_scatter(self, buffer: Buffer, reductions: tuple[Reduction, ...], label: int = 0) -> Work:
        """Deliver this rank's own term as the sum."""
        check_reductions(reductions, self.world_size)
        for r in reductions:
            deliver(slice_of(r.flat, self.rank, self.world_size), r)
        return FINISHED

    def all_reduce(self, tensor: Tensor, op: str = "sum", after: Work = FINISHED, label: int = 0) -> Work:
        """Leave the tensor as it is."""
        return after

    def all_to_all(self, buffer: Buffer, parts: tuple[AllToAllPart, ...], into: Tensor, label: int = 0) -> Work:
        """Nothing arrives."""
        into.zero_()
        return FINISHED

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Leave the tensor as it is."""

    def barrier(self) -> None:
        """Return at once."""

    def exchange(self, message: bytes, combine: Combine, label: int = 0) -> bytes:
        """Return this rank's message."""
        return message

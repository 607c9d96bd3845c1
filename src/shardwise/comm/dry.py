"""Collectives that move nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.comm.buffers import (
    POISON_BYTE,
    check_reductions,
    deliver,
    poison_asked,
    private_buffer,
    slice_of,
)
from shardwise.comm.protocol import FINISHED, Buffer, BufferKind, Reduction, Region, Work


class DryCollectives:
    """One rank of any world, without the others.

    For a world of one it is the real thing. For a larger one the shapes, dtypes and local operations are real and the
    peers' contributions are missing, which is what planning on fake tensors needs.
    """

    name = "dry"

    def __init__(self, rank: int, world_size: int, device: torch.device | str, poison: bool | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        self.poison = poison_asked() if poison is None else poison
        self._allocated = 0

    def allocate(self, nbytes: int, kind: BufferKind) -> Buffer:
        self._allocated += 1
        return private_buffer(nbytes, kind, self._allocated - 1, self.device, self.poison)

    def claim(self, buffer: Buffer) -> None:
        return None

    def all_gather(self, buffer: Buffer, regions: tuple[Region, ...]) -> Work:
        return FINISHED

    def release(self, buffer: Buffer) -> None:
        if self.poison:
            buffer.bytes.fill_(POISON_BYTE)

    def detach(self, buffer: Buffer) -> Buffer:
        return private_buffer(buffer.bytes.numel(), buffer.kind, buffer.index, self.device, self.poison)

    @torch.no_grad()
    def reduce_scatter(self, buffer: Buffer, reductions: tuple[Reduction, ...]) -> Work:
        check_reductions(reductions, self.world_size)
        for r in reductions:
            deliver(slice_of(r.flat, self.rank, self.world_size), r)
        return FINISHED

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
        return FINISHED

    def broadcast(self, tensor: Tensor, src: int) -> None:
        return None

    def barrier(self) -> None:
        return None

    def close(self) -> None:
        return None

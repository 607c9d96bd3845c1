"""Host memory that an asynchronous save copies this rank's bytes to: once a save, into the same pages every time."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from shardwise.checkpoint.piece import Piece
from shardwise.layout.flat import round_up

_ALIGN_BYTES = 64


class HostMemory:
    """One buffer, as large as the largest copy so far; pinned where pieces lie on a GPU."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    def copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The same pieces with their numbers of now, in this memory: what the last call returned is overwritten.

        pieces: 1-D, of one device.
        """
        starts, nbytes = [], 0
        for piece in pieces:
            starts.append(nbytes)
            nbytes = round_up(nbytes + piece.tensor.nbytes, _ALIGN_BYTES)
        devices = {piece.tensor.device for piece in pieces if piece.tensor.device.type == "cuda"}
        if nbytes > self.nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")  # first gone, so that both are never there
            self._buffer = _room(nbytes, pinned=bool(devices))
        copies = []
        for piece, start in zip(pieces, starts, strict=True):
            room = self._buffer[start : start + piece.tensor.nbytes].view(piece.tensor.dtype)
            copies.append(piece.with_tensor(room.copy_(piece.tensor, non_blocking=True)))
        for device in devices:  # the copies are behind the optimizer's step in the same stream
            torch.cuda.current_stream(device).synchronize()
        return copies


def _room(nbytes: int, pinned: bool) -> Tensor:
    """Of its own mapping, in huge pages where there are any: a fresh small page costs more than to fill it."""
    if pinned:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)

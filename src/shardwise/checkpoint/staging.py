"""Host memory that an asynchronous save copies this rank's bytes to: the same pages at every save."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from shardwise import accelerators, device_tools
from shardwise.checkpoint.format.local_tensor import OffloadedPiece, OffloadedStatePiece, Piece, PieceInFewBits
from shardwise.errors import UsageError
from shardwise.files.direct import PAGE_BYTES, huge_page_buffer
from shardwise.fsdp.layout import round_up

_ALIGN_BYTES = 64


class StagingBuffer:
    """One buffer of whole pages, as large as the largest copy so far; pinned if the pieces are on an accelerator.

    Huge pages where possible: a page fault on a fresh 4 KiB page costs more than filling the page. Not from torch's
    allocator of pinned memory, which rounds up to a power of two and keeps what is freed.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._unpin = weakref.finalize(self, lambda: None)
        """Unpins the buffer, at the latest when this object is gone."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that are held between saves."""
        return self._buffer.numel()

    @property
    def address(self) -> int:
        """Where this memory begins."""
        return self._buffer.data_ptr()

    def _allocate(self, nbytes: int) -> Any:
        """Return memory of so many bytes, zeroed or with anything in it."""
        return huge_page_buffer(nbytes)

    def copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Copy the pieces' elements to this memory. The copies that the last call returned are overwritten.

        Args:
            pieces: 1-D, all on one device.

        Returns:
            The same pieces with their elements in this memory. Pieces of frozen parameters in few bits are returned as
            they are. All copies are complete on return: later writes to the tensors do not change them.

        Raises UsageError for a piece that rests on a tier, where the next step would overwrite it.
        """
        for piece in pieces:
            if isinstance(piece, (OffloadedPiece, OffloadedStatePiece)):
                raise UsageError(f"{piece.name!r} is offloaded and cannot be copied: save it with asynchronous=False")
        starts, nbytes = [], 0
        moving = [not isinstance(piece, PieceInFewBits) for piece in pieces]  # these are frozen; decoded as written
        for piece, moves in zip(pieces, moving, strict=True):
            starts.append(nbytes)
            nbytes = round_up(nbytes + piece.tensor.nbytes * moves, _ALIGN_BYTES)
        devices = {piece.tensor.device for piece, moves in zip(pieces, moving, strict=True) if moves}
        accelerated = {device for device in devices if device.type != "cpu"}
        if nbytes > self.nbytes:
            self._unpin()
            self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")  # freed first: never both at once
            self._buffer = torch.frombuffer(self._allocate(round_up(nbytes, PAGE_BYTES)), dtype=torch.uint8)
            for device in accelerated:
                self._unpin = weakref.finalize(self, device_tools.pin(self._buffer, device))
        copies: list[Piece] = []
        for piece, start, moves in zip(pieces, starts, moving, strict=True):
            if not moves:
                copies.append(piece)
                continue
            place = self._buffer[start : start + piece.tensor.nbytes].view(piece.tensor.dtype)
            piece.copy_to(place)
            copies.append(piece.with_tensor(place))
        for device in accelerated:  # the copies follow the optimizer's step on the same stream
            accelerators.current_stream(device).synchronize()
        return copies

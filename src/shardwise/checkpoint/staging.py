"""Host memory that an asynchronous save copies this rank's bytes to: once a save, into the same pages every time.

Two thirds of them, the optimizer's state, nobody writes to before the next step. They are copied by the thread that
goes on to write them, while training computes, and whoever wants them before that is done waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.checkpoint.format.local_tensor import Piece
from shardwise.checkpoint.io.direct import huge_page_buffer
from shardwise.checkpoint.ranks import save_thread
from shardwise.layout.flat import round_up
from shardwise.sharded.snapshot import Snapshot

_ALIGN_BYTES = 64


class Copies:
    """The pieces of one save, with their numbers of the moment of the call in host memory once `finish` has run."""

    def __init__(self, pieces: list[Piece], waiting: list[tuple[Piece, Tensor]]) -> None:
        """
        Args:
            pieces: that will have them.
            waiting: pieces with a holder, whose numbers are still to be copied, and where to.
        """
        self.pieces = pieces
        self._waiting = waiting
        held = [piece.holder for piece, _ in waiting if piece.holder is not None]
        self._snapshot = Snapshot(held, save_thread.remind)

    def begin(self) -> None:
        """From here to `finish`, or `leave`, who wants what is still to be copied waits."""
        self._snapshot.begin()

    def finish(self) -> None:
        """Copy what has waited. In any thread."""
        try:
            for piece, place in self._waiting:
                place.copy_(piece.tensor)
        finally:
            self.leave()

    def leave(self) -> None:
        """Copy nothing more, and let those who wait go on."""
        self._waiting = []
        self._snapshot.end()


class HostMemory:
    """One buffer, as large as the largest copy so far; pinned where pieces lie on a GPU."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    def copy(self, pieces: Sequence[Piece]) -> Copies:
        """The same pieces with their numbers of now, in this memory: what the last call returned is overwritten.

        Those with a holder on the CPU are left for `Copies.finish`; on a GPU the stream orders the copy.

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
        copies, waiting = [], []
        for piece, start in zip(pieces, starts, strict=True):
            place = self._buffer[start : start + piece.tensor.nbytes].view(piece.tensor.dtype)
            copies.append(piece.with_tensor(place))
            if piece.holder is not None and piece.tensor.device.type == "cpu":
                waiting.append((piece, place))
            else:
                place.copy_(piece.tensor, non_blocking=True)
        for device in devices:  # the copies are behind the optimizer's step in the same stream
            torch.cuda.current_stream(device).synchronize()
        return Copies(copies, waiting)


def _room(nbytes: int, pinned: bool) -> Tensor:
    """A fresh small page costs more than to fill it."""
    if pinned:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.frombuffer(huge_page_buffer(nbytes), dtype=torch.uint8)

"""A lane: exchanges of one kind, one a unit, over one group of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm.protocol import AllToAllPart, BufferKind, Collectives, Work
from shardwise.layout.flat import round_up

AHEAD = 2
"""Exchanges of one lane that may be under way, and so its buffers."""
_ALIGN_BYTES = 16


@dataclass(frozen=True, slots=True)
class MatrixTransfer:
    """Elements [start, stop) of a flattened matrix that go from one rank of a group to another."""

    matrix: int
    """Position among its unit's matrices."""
    source: int
    target: int
    start: int
    stop: int

    def nbytes(self, dtypes: Sequence[torch.dtype]) -> int:
        """On the wire: for each of the dtypes so many elements, padded so that the next begin aligned."""
        return sum(_padded(self.stop - self.start, dtype) for dtype in dtypes)


def _padded(numel: int, dtype: torch.dtype) -> int:
    return round_up(numel * dtype.itemsize, _ALIGN_BYTES)


def most_sent_bytes(transfers: Sequence[MatrixTransfer], dtypes: Sequence[Sequence[torch.dtype]]) -> int:
    """The most that any one rank sends of these. `dtypes`: what travels of each matrix."""
    sent: dict[int, int] = {}
    for transfer in transfers:
        sent[transfer.source] = sent.get(transfer.source, 0) + transfer.nbytes(dtypes[transfer.matrix])
    return max(sent.values(), default=0)


class Lane:
    """Every rank of the group posts the same transfers in the same order and waits for them in that order."""

    def __init__(self, group: Collectives, capacity_bytes: int) -> None:
        """Every rank of the group must call this. `capacity_bytes`: the most that any rank sends at once."""
        self._group = group
        count = AHEAD if capacity_bytes else 0
        self._buffers = [group.allocate(capacity_bytes, BufferKind.REDUCE) for _ in range(count)]
        self._posted = 0

    @property
    def nbytes(self) -> int:
        """Of its buffers, which are kept."""
        return sum(buffer.bytes.numel() for buffer in self._buffers)

    def post(
        self,
        transfers: Sequence[MatrixTransfer],
        dtypes: Sequence[Sequence[torch.dtype]],
        outgoing: Callable[[MatrixTransfer], Sequence[Tensor]],
    ) -> Arrivals | None:
        """Begin an exchange. Every rank of the group must call this; None where nothing travels.

        Args:
            transfers: of all ranks.
            dtypes: of each matrix, those of the tensors that travel.
            outgoing: of a transfer that this rank sends, its elements, 1-D, in those dtypes.
        """
        if not transfers:
            return None
        rank = self._group.rank
        sums: dict[tuple[int, int], int] = {}
        for transfer in transfers:
            way = (transfer.source, transfer.target)
            sums[way] = sums.get(way, 0) + transfer.nbytes(dtypes[transfer.matrix])
        parts = tuple(AllToAllPart(*way, nbytes) for way, nbytes in sorted(sums.items()))
        buffer = self._buffers[self._posted % AHEAD]
        self._posted += 1
        self._group.claim(buffer)
        start = 0
        for transfer in sorted((t for t in transfers if t.source == rank), key=lambda t: t.target):
            for tensor in outgoing(transfer):
                buffer.bytes[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor)
                start += _padded(tensor.numel(), tensor.dtype)
        received = sum(part.nbytes for part in parts if part.target == rank)
        into = torch.empty(received, dtype=torch.uint8, device=self._group.device)
        coming = sorted((t for t in transfers if t.target == rank), key=lambda t: t.source)
        return Arrivals(self._group.all_to_all(buffer, parts, into), into, coming, dtypes)


class Arrivals:
    """What comes to this rank in one exchange."""

    def __init__(
        self, work: Work, into: Tensor, transfers: Sequence[MatrixTransfer], dtypes: Sequence[Sequence[torch.dtype]]
    ) -> None:
        self._work = work
        self._into = into
        self._transfers = transfers
        self._dtypes = dtypes

    def wait(self) -> Iterator[tuple[MatrixTransfer, list[Tensor]]]:
        """Wait, at once, for all of it. Returns each transfer with its tensors, views of the memory it came to."""
        self._work.wait()
        starts = itertools.accumulate((t.nbytes(self._dtypes[t.matrix]) for t in self._transfers), initial=0)
        return (
            (transfer, list(self._tensors(transfer, start)))
            for transfer, start in zip(self._transfers, starts, strict=False)
        )

    def _tensors(self, transfer: MatrixTransfer, start: int) -> Iterator[Tensor]:
        numel = transfer.stop - transfer.start
        for dtype in self._dtypes[transfer.matrix]:
            yield self._into[start : start + numel * dtype.itemsize].view(dtype)
            start += _padded(numel, dtype)

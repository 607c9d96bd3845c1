"""A lane: the exchanges of one kind, one per unit, over one group of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm.all_to_all import AllToAllPart, all_to_all
from shardwise.fsdp.collectives import BufferKind, Collectives, Work
from shardwise.fsdp.layout import round_up

AHEAD = 2
"""Exchanges of one lane that may be under way at once, and so the number of its buffers."""
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
        """Return the bytes sent: these elements once in each dtype, padded so that the next ones begin aligned."""
        return sum(_padded(self.stop - self.start, dtype) for dtype in dtypes)


def _padded(numel: int, dtype: torch.dtype) -> int:
    return round_up(numel * dtype.itemsize, _ALIGN_BYTES)


def most_sent_bytes(transfers: Sequence[MatrixTransfer], dtypes: Sequence[Sequence[torch.dtype]]) -> int:
    """Return the most bytes that any one rank sends. `dtypes`: for each matrix, those of the tensors that travel."""
    sent: dict[int, int] = {}
    for transfer in transfers:
        sent[transfer.source] = sent.get(transfer.source, 0) + transfer.nbytes(dtypes[transfer.matrix])
    return max(sent.values(), default=0)


class Lane:
    """Exchanges over one group. Its ranks must post the same transfers, and wait for them, in the same order."""

    def __init__(self, group: Collectives, capacity_bytes: int) -> None:
        """Every rank of the group must call this. `capacity_bytes`: the most that any rank sends at once."""
        self._group = group
        count = AHEAD if capacity_bytes else 0
        self._buffers = [group.allocate(capacity_bytes, BufferKind.REDUCE) for _ in range(count)]
        self._posted = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the lane's buffers, which are kept."""
        return sum(buffer.bytes.numel() for buffer in self._buffers)

    def post(
        self,
        transfers: Sequence[MatrixTransfer],
        dtypes: Sequence[Sequence[torch.dtype]],
        outgoing: Callable[[MatrixTransfer], Sequence[Tensor]],
    ) -> Arrivals | None:
        """Begin an exchange. Every rank of the group must call this. Returns None if there are no transfers.

        Args:
            transfers: those of all ranks.
            dtypes: for each matrix, those of the tensors that travel.
            outgoing: returns the elements of a transfer that this rank sends: 1-D tensors in those dtypes.
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
        return Arrivals(all_to_all(self._group, buffer, parts, into), into, coming, dtypes)


class Arrivals:
    """The transfers that one exchange brings to this rank."""

    def __init__(
        self, work: Work, into: Tensor, transfers: Sequence[MatrixTransfer], dtypes: Sequence[Sequence[torch.dtype]]
    ) -> None:
        self._work = work
        self._into = into
        self._transfers = transfers
        self._dtypes = dtypes

    def wait(self) -> Iterator[tuple[MatrixTransfer, list[Tensor]]]:
        """Wait for the whole exchange. Returns each transfer with its tensors, views of the memory it arrived in."""
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

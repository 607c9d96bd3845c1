"""A wrapper of collectives that records their calls."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from shardwise.comm.all_to_all import AllToAllPart, all_to_all
from shardwise.fsdp.collectives import FINISHED, Buffer, BufferKind, Collectives, Combine, FlatSpan, Reduction, Work

if TYPE_CHECKING:
    import torch

CONTROL_BYTES = 4096
"""An all_reduce of up to this many bytes carries norms, flags or counts, and is recorded as "control"."""


@dataclass(frozen=True, slots=True)
class Event:
    """One call, as seen by this rank."""

    sequence: int
    """Position among this group's recorded calls."""
    op: str
    """all_gather, reduce_scatter, all_reduce, control (small all_reduce, broadcast, barrier), exchange (between hosts),
    or an operation on a buffer: allocate, claim, release, replace."""
    buffer: int | None
    """`Buffer.index` if the call works in a buffer."""
    bytes_sent: int
    """Bytes that this rank sends to its peers, assuming the algorithm that is best for large messages."""
    dtypes: tuple[torch.dtype, ...] = ()
    """Dtypes of the tensors that were summed."""


class RecordingCollectives:
    """A wrapper of another `Collectives` that lists the calls it passes on."""

    def __init__(self, inner: Collectives) -> None:
        self.inner = inner
        self.name = inner.name
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.device = inner.device
        self.on_streams = inner.on_streams
        self.labels = inner.labels
        self.process_group = inner.process_group
        self.events: list[Event] = []

    @property
    def scratch_bytes(self) -> int:
        return self.inner.scratch_bytes

    def bytes_sent(self) -> dict[str, int]:
        """Return the bytes that this rank sent, by op, without ops that sent none."""
        total: Counter[str] = Counter()
        for event in self.events:
            total[event.op] += event.bytes_sent
        return {op: nbytes for op, nbytes in total.items() if nbytes}

    def mark(self) -> Work:
        return self.inner.mark()

    def writing(self, buffer: Buffer, after: Work = FINISHED) -> AbstractContextManager[None]:
        return self.inner.writing(buffer, after)

    def settle(self) -> None:
        self.inner.settle()

    def allocate(self, nbytes: int, kind: BufferKind) -> Buffer:
        buffer = self.inner.allocate(nbytes, kind)
        self._record("allocate", buffer)
        return buffer

    def claim(self, buffer: Buffer) -> None:
        self._record("claim", buffer)
        self.inner.claim(buffer)

    def all_gather(self, buffer: Buffer, spans: tuple[FlatSpan, ...], label: int = 0) -> Work:
        # Each rank sends its slice to every other.
        self._record("all_gather", buffer, sum(r.shard_bytes for r in spans) * (self.world_size - 1))
        return self.inner.all_gather(buffer, spans, label)

    def release(self, buffer: Buffer) -> None:
        self._record("release", buffer)
        self.inner.release(buffer)

    def replace(self, buffer: Buffer) -> Buffer:
        self._record("replace", buffer)
        return self.inner.replace(buffer)

    def drop(self, buffer: Buffer) -> None:
        self._record("drop", buffer)
        self.inner.drop(buffer)

    def reduce_scatter(self, buffer: Buffer, reductions: tuple[Reduction, ...], label: int = 0) -> Work:
        # Each rank sends every other the slice that is theirs, in the dtype that travels.
        nbytes = sum(r.out.numel() * r.flat.itemsize for r in reductions) * (self.world_size - 1)
        self._record("reduce_scatter", buffer, nbytes, tuple(r.flat.dtype for r in reductions))
        return self.inner.reduce_scatter(buffer, reductions, label)

    def advance(self) -> None:
        self.inner.advance()

    def all_reduce(self, tensor: Tensor, op: str = "sum", after: Work = FINISHED, label: int = 0) -> Work:
        # As a reduce-scatter and an all-gather.
        nbytes = tensor.numel() * tensor.itemsize
        sent = 2 * nbytes * (self.world_size - 1) // self.world_size
        self._record("control" if nbytes <= CONTROL_BYTES else "all_reduce", None, sent, (tensor.dtype,))
        return self.inner.all_reduce(tensor, op, after, label)

    def all_to_all(self, buffer: Buffer, parts: tuple[AllToAllPart, ...], into: Tensor, label: int = 0) -> Work:
        self._record("all_to_all", buffer, sum(part.nbytes for part in parts if part.source == self.rank))
        return all_to_all(self.inner, buffer, parts, into, label)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        sent = tensor.numel() * tensor.itemsize * (self.world_size - 1) if src == self.rank else 0
        self._record("control", None, sent)
        self.inner.broadcast(tensor, src)

    def barrier(self) -> None:
        self._record("control", None)
        self.inner.barrier()

    def exchange(self, message: bytes, combine: Combine, label: int = 0) -> bytes:
        # Up a tree and down again; small.
        self._record("exchange", None, 2 * len(message) * (self.world_size > 1))
        return self.inner.exchange(message, combine, label)

    def abandon(self, reason: str = "") -> None:
        self.inner.abandon(reason)

    def close(self) -> None:
        self.inner.close()

    def _record(
        self, op: str, buffer: Buffer | None, bytes_sent: int = 0, dtypes: tuple[torch.dtype, ...] = ()
    ) -> None:
        index = None if buffer is None else buffer.index
        self.events.append(Event(len(self.events), op, index, bytes_sent, dtypes))

"""Collectives of CPU ranks on one x86-64 Linux host, through shared memory.

All ranks share the memory of a gather buffer: a slice is gathered when its rank has written it, so an all_gather only
posts that and waits until the others have posted. A reduce buffer has separate memory for each rank that all can read:
every rank sums its own slice of all of them. Nothing is copied; the counters of `counters.py` order the accesses.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.comm.all_to_all import AllToAllPart, received_parts, sent_parts
from shardwise.comm.backends.rank_order_sum import RankOrderSum, pieces_of, shares
from shardwise.comm.backends.shared_memory.counters import JOURNAL_LINES, Counter, Journal, Watch
from shardwise.comm.backends.shared_memory.segment import Segment, make_private
from shardwise.comm.backends.signature import sign
from shardwise.comm.store_channel import timeout_s
from shardwise.fsdp.collectives import (
    FINISHED,
    POISON_BYTE,
    Buffer,
    BufferKind,
    ChainedWork,
    Combine,
    FlatSpan,
    NoStreams,
    Reduction,
    Work,
    check_reductions,
    poison_asked,
    slice_of,
)

if TYPE_CHECKING:
    import torch.distributed as dist

STAGE_BYTES = 2**20
"""Bytes that each rank can show the others at once, in an all_reduce or broadcast of a tensor that is in no buffer."""
SMALL_BYTES = 64 * 2**10
"""Up to this size every rank sums all of a staged all_reduce; above it each sums a share and shows the result."""
_LENGTH_BYTES = 8


class ShmCollectives(NoStreams):
    """Collectives of CPU ranks on one host."""

    name = "shm"
    on_streams = False

    def __init__(self, group: dist.ProcessGroup, poison: bool | None = None) -> None:
        """Every rank must call this.

        Raises:
            OSError: on every rank, if any rank cannot reach the others' memory.
        """
        self.rank = group.rank()
        self.world_size = group.size()
        self.device = torch.device("cpu")
        self.poison = poison_asked() if poison is None else poison
        self.labels: dict[int, str] = {}
        self._group = group
        self.process_group: dist.ProcessGroup | None = group
        self._watch = Watch(group, timeout_s(group), self.labels)
        self._shared: dict[int, _SharedBuffer] = {}
        """By index, until the buffer is dropped or its last reference is gone."""
        self._held: dict[int, weakref.ref[Buffer]] = {}
        self._allocated = 0
        self._reduce_buffers: dict[int, _SharedBuffer] = {}  # by the address of this rank's memory
        self._scattering: list[_Deferred] = []
        """Reductions that `advance` can finish once every rank has posted, in order."""
        self._sum = RankOrderSum()
        lines = self.world_size * (1 + JOURNAL_LINES)
        stage = Segment(group, lines=lines, parts=self.world_size, part_bytes=2 * STAGE_BYTES)
        self._stages = stage.map(0, self.world_size, populate=False).view(self.world_size, 2, STAGE_BYTES)
        self._turns = Counter(stage.head, 0, self.world_size, self._watch)
        self._turn = 0
        self._journal = Journal(stage.head, self.world_size, self.rank, self.world_size)
        self._watch.journal = self._journal

    @property
    def scratch_bytes(self) -> int:
        """Bytes of partial sums and of this rank's two stages."""
        return self._sum.scratch_bytes + 2 * STAGE_BYTES

    def allocate(self, nbytes: int, kind: BufferKind) -> Buffer:
        """Allocate shared memory: for a gather buffer one region of all ranks, for a reduce buffer one of each rank."""
        self._meet(sign("allocate", 0, nbytes, kind))  # ranks that disagree would map wrong memory
        shared = _SharedBuffer(self._group, self._watch, self._allocated, nbytes, kind)
        self._shared[shared.index] = shared
        self._allocated += 1
        buffer = self._map(shared)
        if self.poison:
            buffer.bytes.fill_(POISON_BYTE)
            self.barrier()
        return buffer

    def claim(self, buffer: Buffer) -> None:
        """Wait until no rank reads the contents of the buffer's last use."""
        shared = self._shared[buffer.index]
        shared.pending.wait()
        shared.finished.wait(shared.uses, "claim", shared.signature)

    def all_gather(self, buffer: Buffer, spans: tuple[FlatSpan, ...], label: int = 0) -> Work:
        """Post that this rank's slices are written. The work waits until every rank has posted."""
        return self._post(self._shared[buffer.index], sign("all_gather", label, buffer.index, spans))

    def release(self, buffer: Buffer) -> None:
        """Post that this rank has read the buffer."""
        shared = self._shared[buffer.index]
        shared.finished.post(shared.uses)
        if self.poison:
            shared.finished.wait(shared.uses, "release")
            share = -(-buffer.bytes.numel() // self.world_size)
            buffer.bytes[self.rank * share : (self.rank + 1) * share].fill_(POISON_BYTE)
            shared.poisoned.post(shared.uses)
            shared.poisoned.wait(shared.uses, "release")

    def replace(self, buffer: Buffer) -> Buffer:
        """Return a new mapping of the buffer; put private memory with the same contents under the old views."""
        replacement = self._map(self._shared[buffer.index])
        self._reduce_buffers.pop(buffer.bytes.data_ptr(), None)
        make_private(buffer.bytes)
        return replacement

    def drop(self, buffer: Buffer) -> None:
        """Forget the buffer's segment. Peers that still read it have mappings of their own."""
        self._held.pop(buffer.index)
        shared = self._shared.pop(buffer.index)
        shared.pending.wait()
        self._reduce_buffers.pop(buffer.bytes.data_ptr(), None)

    def reduce_scatter(self, buffer: Buffer, reductions: tuple[Reduction, ...], label: int = 0) -> Work:
        """Post that gradients are written. `Work.wait` sums this rank's slice of every rank's buffer, in rank order."""
        check_reductions(reductions, self.world_size, may_scale=False)
        shared = self._shared[buffer.index]
        shared.pending.wait()
        what = tuple((r.flat.storage_offset(), r.flat.dtype, r.out.numel()) for r in reductions)
        arrival = self._post(shared, sign("reduce_scatter", label, buffer.index, what))

        def sum_own_slices() -> None:
            for r in reductions:
                terms = [slice_of(theirs, self.rank, self.world_size) for theirs in shared.everybodys(r.flat)]
                self._sum(terms, r.out, r.accumulate)
            shared.finished.post(arrival.use)

        work = _Deferred(shared, arrival, sum_own_slices)
        self._scattering = [*(other for other in self._scattering if not other.is_done), work]
        return work

    def advance(self) -> None:
        """Finish reductions, in order, up to the first one that some rank has not posted."""
        for work in self._scattering:  # in order: a later one may add to the output of an earlier one
            if not work.is_ready():
                return
            work.wait()

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor, op: str = "sum", after: Work = FINISHED, label: int = 0) -> Work:
        """Reduce in place if the tensor is in a reduce buffer, else through the stages, in pieces of STAGE_BYTES."""
        if after is not FINISHED:
            return ChainedWork(after, lambda: self.all_reduce(tensor, op, label=label))
        flat = tensor.detach().view(-1)
        shared = self._reduce_buffers.get(flat.untyped_storage().data_ptr())
        if shared is None:
            for chunk in pieces_of(flat, STAGE_BYTES // flat.itemsize):
                self._all_reduce_staged(chunk, op, label)
            return FINISHED
        shared.pending.wait()
        what = shared.index, flat.storage_offset(), flat.dtype, flat.numel(), op
        arrival = self._post(shared, sign("all_reduce", label, *what))
        shared.use()
        return _Deferred(shared, arrival, partial(self._all_reduce_in_place, shared, arrival.use, flat, op))

    def all_to_all(self, buffer: Buffer, parts: tuple[AllToAllPart, ...], into: Tensor, label: int = 0) -> Work:
        """Post that the parts are written. `Work.wait` copies this rank's parts out of the others' buffers."""
        shared = self._shared[buffer.index]
        shared.pending.wait()
        arrival = self._post(shared, sign("all_to_all", label, buffer.index, parts))

        def fetch() -> None:
            everybodys = shared.everybodys(buffer.bytes)
            for part, start in received_parts(parts, self.rank):
                (at,) = (begin for sent, begin in sent_parts(parts, part.source) if sent.target == self.rank)
                into[start : start + part.nbytes].copy_(everybodys[part.source][at : at + part.nbytes])
            shared.finished.post(arrival.use)

        return _Deferred(shared, arrival, fetch)

    @torch.no_grad()
    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Broadcast through rank `src`'s stage, in pieces of STAGE_BYTES."""
        flat = tensor.detach().view(-1)
        for chunk in pieces_of(flat, STAGE_BYTES // flat.itemsize):
            mine = chunk if self.rank == src else None
            shown = self._meet(sign("broadcast", 0, chunk.numel(), chunk.dtype, src), mine)
            if self.rank != src:
                chunk.copy_(shown[src, : chunk.numel() * chunk.itemsize].view(chunk.dtype))

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self._meet(sign("barrier"))

    @torch.no_grad()
    def exchange(self, message: bytes, combine: Combine, label: int = 0) -> bytes:
        """Exchange through the stages, in as many turns as the longest message needs."""
        room = STAGE_BYTES - _LENGTH_BYTES
        said = [b""] * self.world_size
        length = len(message).to_bytes(_LENGTH_BYTES, "little")
        for start in range(0, 2**62, room):  # one turn suffices for the messages of all real models
            part = torch.frombuffer(bytearray(length + message[start : start + room]), dtype=torch.uint8)
            rows = self._meet(sign("exchange", label), part).numpy()
            lengths = [int.from_bytes(row[:_LENGTH_BYTES].tobytes(), "little") for row in rows]
            for rank, row in enumerate(rows):
                held = min(room, lengths[rank] - start)
                said[rank] += row[_LENGTH_BYTES : _LENGTH_BYTES + max(0, held)].tobytes()
            if start + room >= max(lengths):
                break
        self._watch.reasons.forget()
        return functools.reduce(combine, said)

    def abandon(self, reason: str = "") -> None:
        """Note it in the journal, which peers read while they wait."""
        self._watch.reasons.tell(reason)
        self._journal.write(sign("fail" if self._watch.has_failed else "abandon"))

    def close(self) -> None:
        """Forget every segment. Memory and file descriptors are freed with the last view of a buffer."""
        for shared in self._shared.values():
            shared.expect(FINISHED)  # breaks the cycle between buffer and pending work
        self._shared.clear()
        self._reduce_buffers.clear()
        self._scattering.clear()

    def _map(self, shared: _SharedBuffer) -> Buffer:
        buffer = Buffer(shared.map_own(), shared.kind, shared.index)
        if shared.kind is BufferKind.REDUCE:
            self._reduce_buffers[buffer.bytes.data_ptr()] = shared
        on_gone = partial(_forget, weakref.ref(self), buffer.index, buffer.bytes.data_ptr())
        self._held[buffer.index] = weakref.ref(buffer, on_gone)  # replaces the callback of an earlier mapping
        return buffer

    def _post(self, shared: _SharedBuffer, signature: int) -> _Arrival:
        self._journal.write(signature)
        shared.signature = signature
        shared.posted.post(shared.use(), signature)
        return _Arrival(shared, signature)

    def _meet(self, signature: int, mine: Tensor | None = None) -> Tensor:
        """Show `mine` to all ranks in this turn, and wait until every rank has come to it.

        Returns the stages of all ranks, [world_size, STAGE_BYTES] uint8. They are valid until the next turn but one: a
        rank that comes to the next turn has read those of this one.
        """
        self._turn += 1
        stages = self._stages[:, self._turn % 2]
        if mine is not None and mine.numel():
            stages[self.rank, : mine.numel() * mine.itemsize].view(mine.dtype).copy_(mine)
        self._journal.write(signature)
        self._turns.post(self._turn, signature)
        self._turns.wait(self._turn, signature)
        return stages

    def _all_reduce_staged(self, chunk: Tensor, op: str, label: int) -> None:
        signature = sign("all_reduce", label, chunk.numel(), chunk.dtype, op)
        nbytes = chunk.numel() * chunk.itemsize
        shown = self._meet(signature, chunk)[:, :nbytes].view(chunk.dtype)
        if nbytes <= SMALL_BYTES:
            self._sum(list(shown), chunk, op=op)
            return
        parts = shares(chunk, self.world_size)
        self._sum([shares(theirs, self.world_size)[self.rank] for theirs in shown], parts[self.rank], op=op)
        shown = self._meet(signature, parts[self.rank])
        for part, theirs in zip(parts, shown, strict=True):
            part.copy_(theirs[: part.numel() * part.itemsize].view(part.dtype))

    @torch.no_grad()
    def _all_reduce_in_place(self, shared: _SharedBuffer, use: int, flat: Tensor, op: str) -> None:
        """Sum this rank's share of the ranks' tensors into memory that peers can read, then copy the peers' shares."""
        by_rank = [shares(theirs, self.world_size) for theirs in shared.everybodys(flat)]
        own = by_rank[self.rank]
        self._sum([parts[self.rank] for parts in by_rank], own[self.rank], op=op)
        shared.finished.post(use)
        shared.finished.wait(use, "all_reduce")
        for rank, parts in enumerate(by_rank):
            if rank != self.rank:
                own[rank].copy_(parts[rank])
        # The caller may write the tensor after this, so wait until no rank reads it.
        shared.finished.post(use + 1)
        shared.finished.wait(use + 1, "all_reduce")


def _forget(collectives: weakref.ref[ShmCollectives], index: int, address: int, _: object) -> None:
    """Forget a buffer whose last reference is gone, as when a model is freed. Like `drop`, but without waiting."""
    held = collectives()
    if held is not None and held._held.pop(index, None) is not None:
        del held._shared[index]
        held._reduce_buffers.pop(address, None)


class _SharedBuffer:
    """The shared memory of one buffer, and counters of how far each rank is with it."""

    def __init__(self, group: dist.ProcessGroup, watch: Watch, index: int, nbytes: int, kind: BufferKind) -> None:
        self.rank = group.rank()
        self.world_size = world_size = group.size()
        self.index = index
        self.kind = kind
        self.uses = 0
        """How often this rank has posted the buffer: once for a gather or a reduction, twice for an all_reduce."""
        self.signature = 0
        """The signature of this rank's last post, or 0."""
        self.pending: Work = FINISHED
        self._nbytes = nbytes
        parts = world_size if kind is BufferKind.REDUCE else 1
        self._segment = Segment(group, lines=3 * world_size, parts=parts, part_bytes=nbytes)
        self._all = self._segment.map(0, parts, populate=False).view(parts, -1)
        self.posted = Counter(self._segment.head, 0, world_size, watch)
        self.finished = Counter(self._segment.head, 1, world_size, watch)
        """Number of uses after which a rank no longer reads what others wrote."""
        self.poisoned = Counter(self._segment.head, 2, world_size, watch)

    def use(self) -> int:
        """Count another use of the buffer by this rank. Returns the number of uses."""
        self.uses += 1
        return self.uses

    def expect(self, work: Work) -> None:
        """Set the work that must finish before the buffer is posted or written again."""
        self.pending = work

    def map_own(self) -> Tensor:
        first = self.rank if self.kind is BufferKind.REDUCE else 0
        return self._segment.map(first, 1, populate=True)[: self._nbytes]

    def everybodys(self, flat: Tensor) -> list[Tensor]:
        """Return, for each rank, the part of its reduce buffer that corresponds to `flat`, a view of this rank's."""
        start = flat.storage_offset() * flat.itemsize
        theirs = self._all[:, start : start + flat.numel() * flat.itemsize].view(flat.dtype)
        return [flat if rank == self.rank else tensor for rank, tensor in enumerate(theirs)]


class _Arrival:
    """The posts of all ranks for one use of a buffer."""

    def __init__(self, shared: _SharedBuffer, signature: int) -> None:
        self.use = shared.uses
        self._posted = shared.posted
        self._signature = signature

    def is_there(self) -> bool:
        return self._posted.reached(self.use)

    def wait(self) -> None:
        self._posted.wait(self.use, self._signature)


class _Deferred:
    """A `Work` that finishes a posted collective in `wait`, not before: by then fewer peers are late."""

    def __init__(self, shared: _SharedBuffer, arrival: _Arrival, finish: Callable[[], None]) -> None:
        shared.expect(self)
        self._left: tuple[_SharedBuffer, _Arrival, Callable[[], None]] | None = shared, arrival, finish

    @property
    def is_done(self) -> bool:
        return self._left is None

    def is_ready(self) -> bool:
        """Whether every rank has posted, or the work is done."""
        return self._left is None or self._left[1].is_there()

    def wait(self) -> None:
        if self._left is None:
            return
        (shared, arrival, finish), self._left = self._left, None
        shared.expect(FINISHED)
        arrival.wait()
        finish()

"""A step's memory: live bytes, and the bytes that a caching allocator reserves for them.

CUDA's caching allocator (PyTorch's c10/cuda/CUDACachingAllocator.cpp) asks the driver for segments and cuts blocks out
of them; a freed block is joined with its free neighbours and reused by a later request. The reserved bytes are the sum
of the segments. That is more than the most live bytes, because a request must fit into one free block.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from shardwise.plan.dry_run.recording import Allocate, Free, StepEvent

MIB = 2**20
ROUND_BYTES = 512
"""Every request is rounded up to a multiple of this."""
_SMALL_BYTES = MIB
"""Requests up to this come from the small pool."""
_SMALL_SEGMENT_BYTES = 2 * MIB
_MIDDLE_BYTES = 10 * MIB
"""Requests below this get a segment of a fixed size, which they share."""
_MIDDLE_SEGMENT_BYTES = 20 * MIB
_ROUND_SEGMENT_BYTES = 2 * MIB
"""Larger requests get a segment of their own, rounded up to a multiple of this."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment of a step with the most live bytes."""

    nbytes: int
    """Live bytes, with each block rounded up as the device's allocator rounds."""
    kinds: dict[str, int]
    """Live bytes by kind; they add up to `nbytes`."""
    phase: str
    module: str
    """fqn of the module that asked for the block with which the peak was reached; "" outside of modules."""


def peak_of(events: Iterable[StepEvent], round_bytes: int = ROUND_BYTES) -> Peak:
    """Return the moment with the most live bytes."""
    live: dict[int, tuple[str, int]] = {}
    kinds: Counter[str] = Counter()
    peak = Peak(0, {}, "setup", "")
    total = highest = 0
    for event in events:
        if isinstance(event, Allocate):
            nbytes = -(-event.nbytes // round_bytes) * round_bytes
            live[event.block] = event.kind, nbytes
            kinds[event.kind] += nbytes
            total += nbytes
            if total > highest:
                highest = total
                peak = Peak(total, kinds, event.phase.value, event.module)
        elif isinstance(event, Free):
            if peak.kinds is kinds:  # keep the counts of the peak so far; growing counts are never copied
                kinds = Counter(kinds)
            kind, nbytes = live.pop(event.block)
            kinds[kind] -= nbytes
            total -= nbytes
    return Peak(peak.nbytes, {kind: nbytes for kind, nbytes in peak.kinds.items() if nbytes}, peak.phase, peak.module)


class Segments(enum.Enum):
    """How the allocator gets memory from the driver."""

    FIXED = "fixed"
    """A segment keeps its size: the default."""
    EXPANDABLE = "expandable"
    """One segment for each pool and stream, which grows: `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`."""


def reserved_bytes(
    events: Iterable[StepEvent],
    segments: Segments = Segments.FIXED,
    capacity_bytes: int | None = None,
    streams: Mapping[int, int] | None = None,
    late: Collection[int] = (),
) -> int:
    """Return the most bytes that CUDA's caching allocator reserves for a step's events.

    Args:
        events: of a step that is run twice: the second pass starts with the segments that the first one left.
        segments: how the allocator gets memory from the driver.
        capacity_bytes: the device's memory for the allocator. Before the allocator asks for more than that, it returns
            segments that are wholly free to the driver. None: no limit.
        streams: by block, the stream on which it was requested, if that is not the compute stream. A stream reuses
            only its own blocks.
        late: blocks that another stream still reads when they are freed. The host runs ahead, so they cannot be reused
            by the next request of their kind, only by the one after.

    Returns:
        Bytes; more than `capacity_bytes` if the step does not fit into that.
    """
    allocator = CachingAllocator(segments, capacity_bytes)
    repeated = list(events)
    on = streams or {}
    kinds = {event.block: event.kind for event in repeated if isinstance(event, Allocate) and event.block in late}
    awaited: dict[str, _Block] = {}  # by kind: freed, but still read
    for time in range(2):
        held: dict[int, _Block] = {}
        for event in repeated:
            if isinstance(event, Allocate):
                if time and event.block in allocator.kept:
                    continue
                held[event.block] = allocator.allocate(event.nbytes, on.get(event.block, 0))
                if event.kind in awaited:
                    allocator.free(awaited.pop(event.kind))
            elif isinstance(event, Free):
                block = held.pop(event.block)
                if event.block not in kinds:
                    allocator.free(block)
                    continue
                if kinds[event.block] in awaited:
                    allocator.free(awaited[kinds[event.block]])
                awaited[kinds[event.block]] = block
        allocator.kept |= held.keys()
    return allocator.peak_reserved_bytes


@dataclass(slots=True, eq=False)
class _Block:
    """A piece of a segment, with its neighbours in the segment."""

    address: int
    nbytes: int
    pool: _Pool
    free: bool = False
    before: _Block | None = None
    after: _Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.nbytes, self.address


@dataclass(slots=True, eq=False)
class _Pool:
    """Blocks of one stream, small or large."""

    small: bool
    keys: list[tuple[int, int]] = field(default_factory=list)
    """(bytes, address) of the free blocks, ascending."""
    free: dict[int, _Block] = field(default_factory=dict)
    """The free blocks by address."""
    last: _Block | None = None
    """The last block of the expandable segment."""

    def put(self, block: _Block) -> None:
        block.free = True
        insort(self.keys, block.key)
        self.free[block.address] = block

    def take(self, block: _Block) -> None:
        block.free = False
        del self.keys[bisect_left(self.keys, block.key)]
        del self.free[block.address]

    def best(self, nbytes: int) -> _Block | None:
        """Return the smallest free block that is large enough, among equals the one at the lowest address."""
        position = bisect_left(self.keys, (nbytes, -1))
        return self.free[self.keys[position][1]] if position < len(self.keys) else None


class CachingAllocator:
    """The rules of CUDA's caching allocator, without the memory."""

    def __init__(self, segments: Segments = Segments.FIXED, capacity_bytes: int | None = None) -> None:
        self.segments = segments
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self.kept: set[int] = set()
        """Blocks that were allocated in a step and outlive it."""
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._next_address = 0

    def allocate(self, nbytes: int, stream: int = 0) -> _Block:
        """Return a block for a request of `nbytes`."""
        nbytes = max(ROUND_BYTES, -(-nbytes // ROUND_BYTES) * ROUND_BYTES)
        small = nbytes <= _SMALL_BYTES
        pool = self._pools.setdefault((stream, small), _Pool(small))
        block = pool.best(nbytes)
        if block is not None:
            pool.take(block)
        elif self.segments is Segments.EXPANDABLE:
            block = self._grow(pool, nbytes)
        else:
            block = self._segment(pool, nbytes)
        self._split(block, nbytes)
        return block

    def free(self, block: _Block) -> None:
        """Free a block and join it with its free neighbours."""
        pool = block.pool
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                pool.take(neighbour)
                block = self._join(*sorted((block, neighbour), key=lambda b: b.address))
        pool.put(block)

    def _segment(self, pool: _Pool, nbytes: int) -> _Block:
        if pool.small:
            size = _SMALL_SEGMENT_BYTES
        elif nbytes < _MIDDLE_BYTES:
            size = _MIDDLE_SEGMENT_BYTES
        else:
            size = -(-nbytes // _ROUND_SEGMENT_BYTES) * _ROUND_SEGMENT_BYTES
        self._reserve(size)
        block = _Block(self._next_address, size, pool)
        self._next_address += size
        return block

    def _grow(self, pool: _Pool, nbytes: int) -> _Block:
        """Extend the pool's segment and return its last block: the new memory joined with what is free before it."""
        last = pool.last
        page = _SMALL_SEGMENT_BYTES if pool.small else _MIDDLE_SEGMENT_BYTES
        missing = nbytes - (last.nbytes if last is not None and last.free else 0)
        size = -(-missing // page) * page
        self._reserve(size)
        if last is None:
            block = _Block(self._next_address, size, pool)
            self._next_address += 2**50  # address space enough for everything
        else:
            block = _Block(last.address + last.nbytes, size, pool, before=last)
            last.after = block
            if last.free:
                pool.take(last)
                block = self._join(last, block)
        pool.last = block
        return block

    def _reserve(self, size: int) -> None:
        if self.capacity_bytes is not None and self.reserved_bytes + size > self.capacity_bytes:
            self._give_back()
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _give_back(self) -> None:
        """Return segments that are wholly free to the driver. Free pages of expandable segments are not returned here,
        unlike in the real allocator."""
        for pool in self._pools.values():
            for block in list(pool.free.values()):
                if block.before is None and block.after is None and block is not pool.last:
                    pool.take(block)
                    self.reserved_bytes -= block.nbytes

    def _split(self, block: _Block, nbytes: int) -> None:
        rest = block.nbytes - nbytes
        pool = block.pool
        least = ROUND_BYTES if pool.small or self.segments is Segments.EXPANDABLE else _SMALL_BYTES + 1
        if rest < least:
            return
        remaining = _Block(block.address + nbytes, rest, pool, before=block, after=block.after)
        if block.after is not None:
            block.after.before = remaining
        block.nbytes, block.after = nbytes, remaining
        if pool.last is block:
            pool.last = remaining
        pool.put(remaining)

    @staticmethod
    def _join(first: _Block, second: _Block) -> _Block:
        first.nbytes += second.nbytes
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if first.pool.last is second:
            first.pool.last = first
        return first

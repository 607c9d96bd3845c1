"""Recordings of deep models from those of shallow ones, where that is exact.

In a stack of equal blocks the engine is in a steady state: each block adds to a step what the one before it added. So
two recordings, the second with one *gap* of blocks (a multiple of the period after which the stack repeats itself) more
than the first, determine a third with any number of gaps more. They are read side by side. Events that only the deeper
one has are a *chunk*: it is repeated, with block numbers counting on. All other events occur once, with sizes that grow
linearly with the depth (such as an optimizer's kernel over all parameters).

Nothing is assumed. A chunk must equal the events before or after it in the deeper recording, except for block numbers
that differ by one period, so the steady state is verified. And the same construction must reproduce the deeper
recording from the shallower one, event by event.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, get_args

from shardwise.plan.dry_run.recording import (
    Allocate,
    Collective,
    Facts,
    Free,
    Gradient,
    HostCopy,
    Kernel,
    Recording,
    StepEvent,
    StepPhase,
    UnitMark,
    Wait,
    changed,
)

_WINDOW = 8
"""The number of events that must agree after a chunk for two recordings to count as aligned again."""


_EVERYTHING: tuple[type, ...] = (object,)
_ALLOCATIONS: tuple[type, ...] = (Allocate,)


class _Uneven(Exception):
    """Two recordings differ by more than repeated chunks and linear growth."""


def deepened(
    shallow: Recording, deeper: Recording, container: str, period: int, gap: int, gaps: int
) -> Recording | None:
    """Return the recording of the same model with more blocks.

    Args:
        shallow: the recording of a model without some of its blocks.
        deeper: the recording of the same model with `gap` blocks more.
        container: fqn of the module that contains the stack; the blocks are its children, named by their numbers.
        period: the number of blocks after which the stack repeats itself.
        gap: a multiple of the period.
        gaps: the number of gaps to add to `shallow`, 1 or more.

    Returns:
        None if the two recordings do not show one steady state.
    """
    numbered = _Numbered(container)
    try:
        aligned = _aligned(_items(shallow.events, numbered), _items(deeper.events, numbered), period, gap)
        again = _built(aligned, 1, gap, numbered)
        if again != deeper.events:
            return None
        return replace(
            shallow,
            facts=_deeper_facts(shallow.facts, deeper.facts, numbered, (period, gap, gaps)),
            events=_built(aligned, gaps, gap, numbered),
        )
    except _Uneven:
        return None


# Events with their positions ------------------------------------------------------------------------------------------


class _Numbered:
    """Splits names of modules in one container into a block's number and the rest."""

    def __init__(self, container: str) -> None:
        self._pattern = re.compile(rf"({re.escape(container + '.' if container else '')})(\d+)(?=\.|$)(.*)")
        self._known: dict[str, tuple[str, int | None]] = {}

    def split(self, fqn: str) -> tuple[str, int | None]:
        """Return the name with a placeholder for its block's number, and the number; None as number outside of
        blocks."""
        if fqn not in self._known:
            match = self._pattern.fullmatch(fqn)
            self._known[fqn] = (fqn, None) if match is None else (f"{match[1]}#{match[3]}", int(match[2]))
        return self._known[fqn]

    def name(self, shape: str, number: int | None) -> str:
        """Return the name that `split` took apart, with this number."""
        return shape if number is None else shape.replace("#", str(number), 1)


class _StepPosition(NamedTuple):
    """The position in a step at which a block of memory was allocated, or a collective or copy was launched."""

    stretch: int
    """0 for setup; then each forward, each backward and the optimizer's step has the next number."""
    segment: int | None
    """The number of the block that was gathered last in this stretch; None before the first."""
    ordinal: int
    """The position within that segment; blocks of memory are counted apart from collectives and copies."""


class _Item(NamedTuple):
    """An event, split into parts that are compared in different ways."""

    event: StepEvent
    shape: tuple[object, ...]
    """The values that must be equal."""
    number: int | None
    """The number of the block that the event names."""
    sizes: tuple[int, ...]
    """The values that may grow with the depth."""
    refers: _StepPosition | None
    """Position of the allocation, collective or copy that the event refers to; None if it refers to none."""
    origin: int | None
    """The index of the item that the event refers to."""


_SIZES: dict[type[StepEvent], tuple[str, ...]] = {
    Kernel: ("flops", "bytes_moved"),
    Allocate: ("nbytes",),
    Collective: ("nbytes",),
    HostCopy: ("nbytes",),
}
_OWNER = {
    Kernel: "module",
    Allocate: "module",
    Collective: "unit",
    HostCopy: "module",
    UnitMark: "unit",
    Gradient: "unit",
}
"""The field that contains a fqn, by type of event."""
_APART = frozenset({"block", "number", "matmul", "flops", "bytes_moved", "nbytes", "module", "unit"})
_COMPARED: dict[type[StepEvent], tuple[str, ...]] = {
    kind: tuple(known.name for known in fields(kind) if known.name not in _APART) for kind in get_args(StepEvent)
}
"""The fields that must be equal, by type of event."""


class _StepPositions:
    """Assigns positions to the events of a step, in order."""

    def __init__(self, numbered: _Numbered) -> None:
        self._numbered = numbered
        self._stretch = 0
        self._phase = StepPhase.SETUP
        self._segment: int | None = None
        self._counts: Counter[tuple[bool, int, int | None]] = Counter()

    def take(self, event: StepEvent) -> _StepPosition | None:
        """Return the position of the allocation, collective or copy that this event is; None for any other event."""
        phase = getattr(event, "phase", self._phase)
        phase = StepPhase.BACKWARD if phase is StepPhase.RECOMPUTE else phase
        if phase is not self._phase:
            self._stretch, self._phase, self._segment = self._stretch + 1, phase, None
        if isinstance(event, UnitMark) and event.what == "gather":
            shape, number = self._numbered.split(event.unit)
            if number is not None and shape.endswith("#"):
                self._segment = number
        if not isinstance(event, Allocate | Collective | HostCopy):
            return None
        counted = (not isinstance(event, Allocate), self._stretch, self._segment)
        self._counts[counted] += 1
        return _StepPosition(self._stretch, self._segment, self._counts[counted])


def _items(events: Sequence[StepEvent], numbered: _Numbered) -> list[_Item]:
    positions = _StepPositions(numbered)
    blocks: dict[int, tuple[_StepPosition, int]] = {}
    collectives: dict[int, tuple[_StepPosition, int]] = {}
    items = []
    for index, event in enumerate(events):
        kind = type(event)
        position = positions.take(event)
        refers: tuple[_StepPosition, int] | tuple[None, None] = None, None
        if isinstance(event, Allocate):
            assert position is not None
            blocks[event.block] = position, index
        elif isinstance(event, Collective | HostCopy):
            assert position is not None
            collectives[event.number] = position, index
        elif isinstance(event, Free | Gradient):
            refers = blocks[event.block]
        elif isinstance(event, Wait):
            if event.number not in collectives:
                raise _Uneven
            refers = collectives[event.number]
        name, number = numbered.split(getattr(event, _OWNER[kind])) if kind in _OWNER else ("", None)
        shape = (kind, name, *(getattr(event, field) for field in _COMPARED[kind]))
        sizes = tuple(getattr(event, field) for field in _SIZES.get(kind, ()))
        if isinstance(event, Kernel) and event.matmul is not None:
            shape, sizes = (*shape, "matmul"), (*sizes, *event.matmul)
        items.append(_Item(event, shape, number, sizes, *refers))
    return items


# Two recordings side by side ------------------------------------------------------------------------------------------


class _Pair(NamedTuple):
    """An event that both recordings have."""

    one: _Item
    """In the shallow recording."""
    other: _Item
    """In the deeper recording."""
    place: int
    """The index of `other`."""


class _Chunk(NamedTuple):
    """Consecutive events that only the deeper recording has."""

    items: list[_Item]
    start: int
    """The index of the first item."""
    step: int
    """By how much block numbers grow from one period to the next: the period, its negative, or 0 if no number
    changes."""


@dataclass
class _Alignment:
    """Aligns the events of two recordings, read side by side."""

    shallow: list[_Item]
    deeper: list[_Item]
    period: int
    gap: int

    def __post_init__(self) -> None:
        self._partner: dict[int, int] = {}
        """The index of an event in the deeper recording, by its index in the shallow one."""

    def read(self) -> Iterator[_Pair | _Chunk]:
        """Yield pairs of events that both have and chunks that only the deeper one has, in its order. Raises
        _Uneven."""
        i = j = 0
        while i < len(self.shallow) or j < len(self.deeper):
            chunk = self._chunk(i, j)
            if chunk is not None:
                yield chunk
                j += len(chunk.items)
                continue
            self._partner[i] = j
            yield _Pair(self.shallow[i], self.deeper[j], j)
            i, j = i + 1, j + 1

    def _chunk(self, i: int, j: int) -> _Chunk | None:
        """Return the chunk of the deeper recording that begins at `j`. None if `i` and `j` are the same event, perhaps
        grown. Raises _Uneven if neither is the case."""
        if i < len(self.shallow) and j < len(self.deeper) and self._same(i, j, _EVERYTHING):
            return None
        surplus = (len(self.deeper) - j) - (len(self.shallow) - i)
        for sized in (_EVERYTHING, _ALLOCATIONS, ()):
            if sized is not _EVERYTHING and self._meet(i, j, sized):
                return None
            for count in range(1, surplus + 1):
                lag, rest = divmod(count * self.period, self.gap)
                if rest or not self._meet(i, j + count, sized):
                    continue
                for first in (j - lag, j):  # it repeats the events before it, or is repeated after it
                    step = self._step(first, first + lag, count)
                    if step is not None:
                        return _Chunk(self.deeper[j : j + count], j, step)
        raise _Uneven

    def _meet(self, i: int, j: int, sized: tuple[type, ...]) -> bool:
        """Whether the next `_WINDOW` events of the two recordings agree, from `i` and `j` on; at the end, all of
        them."""
        window = min(_WINDOW, len(self.shallow) - i, len(self.deeper) - j)
        if not window:
            return len(self.shallow) == i and len(self.deeper) == j
        return all(self._same(i + n, j + n, sized, certain=False) for n in range(window))

    def _same(self, i: int, j: int, sized: tuple[type, ...], certain: bool = True) -> bool:
        """Whether two events are the same event at two depths.

        Args:
            i: index in the shallow recording.
            j: index in the deeper recording.
            sized: types of events whose sizes must be equal too.
            certain: whether all events before them are aligned already. Then what they refer to must be the same event
                even outside of segments.
        """
        one, other = self.shallow[i], self.deeper[j]
        if one.shape != other.shape or not self._moved(one.number, other.number):
            return False
        if one.sizes != other.sizes and isinstance(one.event, sized):
            return False
        if one.refers is None or other.refers is None:
            return one.refers is other.refers
        if one.refers.stretch != other.refers.stretch or not self._moved(one.refers.segment, other.refers.segment):
            return False
        if one.refers.segment is not None:
            return one.refers.ordinal == other.refers.ordinal
        assert one.origin is not None
        return not certain or self._partner.get(one.origin) == other.origin

    def _moved(self, one: int | None, other: int | None) -> bool:
        """Whether two block numbers may be of the same block, counted from the front or from the back."""
        if one is None or other is None:
            return one is other
        return other - one in {0, self.gap}

    def _step(self, first: int, second: int, count: int) -> int | None:
        """Return by how much block numbers grow between two parts of the deeper recording of `count` events each. None
        unless the parts are equal except for that."""
        if first < 0 or second + count > len(self.deeper):
            return None
        steps: set[int | None] = set()
        for one, other in zip(self.deeper[first : first + count], self.deeper[second : second + count], strict=True):
            if one.shape != other.shape or one.sizes != other.sizes or (one.refers is None) != (other.refers is None):
                return None
            steps.add(_rise(one.number, other.number))
            if one.refers is not None and other.refers is not None:
                assert one.origin is not None
                assert other.origin is not None
                if other.origin <= one.origin and one.refers.segment is None:
                    return None  # memory freed last in, first out: which repetition frees which block is unknown
                steps.add(_rise(one.refers.segment, other.refers.segment))
                if one.refers.segment is not None and one.refers.ordinal != other.refers.ordinal:
                    return None
        steps.discard(0)
        if not steps:
            return 0
        return self.period * (1 if self.period in steps else -1) if steps in ({self.period}, {-self.period}) else None


def _rise(one: int | None, other: int | None) -> int | None:
    """Return the difference between two numbers; 0 if both are None, None if only one is."""
    if one is None or other is None:
        return 0 if one is other else None
    return other - one


def _aligned(shallow: list[_Item], deeper: list[_Item], period: int, gap: int) -> list[_Pair | _Chunk]:
    return list(_Alignment(shallow, deeper, period, gap).read())


# The deep one ---------------------------------------------------------------------------------------------------------


class _UnnumberedEvent(NamedTuple):
    """An event of the deep recording before blocks of memory, collectives and copies are numbered."""

    event: StepEvent
    refers: _StepPosition | None
    origin: tuple[int, int] | None
    """The event that it refers to, used outside of segments: (index in the deeper recording, repetition of the
    chunk)."""
    itself: tuple[int, int]
    """The same of the event itself."""


def _built(aligned: list[_Pair | _Chunk], gaps: int, gap: int, numbered: _Numbered) -> tuple[StepEvent, ...]:
    """Return the events with `gaps` gaps of blocks more than the shallow recording has."""
    repeated = {chunk.start + n for chunk in aligned if isinstance(chunk, _Chunk) for n in range(len(chunk.items))}
    parts: list[_UnnumberedEvent] = []
    for entry in aligned:
        if isinstance(entry, _Pair):
            parts.append(_grown(entry, gaps, numbered))
            continue
        for turn in range(gaps):
            ahead = turn if entry.step >= 0 else gaps - 1 - turn
            for n, item in enumerate(entry.items):
                origin = None
                if item.origin is not None and item.refers is not None:
                    if item.refers.segment is None and item.origin not in repeated:
                        raise _Uneven
                    origin = item.origin, turn
                event = _renamed(item, item.number if item.number is None else item.number + ahead * gap, numbered)
                refers = item.refers
                if refers is not None and refers.segment is not None:
                    refers = refers._replace(segment=refers.segment + ahead * gap)
                parts.append(_UnnumberedEvent(event, refers, origin, (entry.start + n, turn)))
    return _resolved(parts, numbered)


def _grown(pair: _Pair, gaps: int, numbered: _Numbered) -> _UnnumberedEvent:
    one, other = pair.one, pair.other

    def line(at_one: int, at_other: int) -> int:
        return at_one + (at_other - at_one) * gaps

    number = one.number if one.number is None or other.number is None else line(one.number, other.number)
    event = _renamed(one, number, numbered)
    if one.sizes != other.sizes:
        sizes = [line(a, b) for a, b in zip(one.sizes, other.sizes, strict=True)]
        names = _SIZES[type(event)]
        changes: dict[str, Any] = dict(zip(names, sizes, strict=False))
        if len(sizes) > len(names):
            changes["matmul"] = tuple(sizes[len(names) :])
        event = changed(event, **changes)
    refers = one.refers
    if refers is not None and refers.segment is not None:
        assert other.refers is not None
        assert other.refers.segment is not None
        refers = refers._replace(segment=line(refers.segment, other.refers.segment))
    return _UnnumberedEvent(event, refers, None if other.origin is None else (other.origin, 0), (pair.place, 0))


def _renamed(item: _Item, number: int | None, numbered: _Numbered) -> StepEvent:
    if number is None or number == item.number:
        return item.event
    field = _OWNER[type(item.event)]
    shape, _ = numbered.split(getattr(item.event, field))
    renamed: StepEvent = changed(item.event, **{field: numbered.name(shape, number)})
    return renamed


def _resolved(parts: list[_UnnumberedEvent], numbered: _Numbered) -> tuple[StepEvent, ...]:
    """Return the events with blocks of memory, collectives and copies numbered in their order. Raises _Uneven if an
    event refers to one that does not exist."""
    positions = _StepPositions(numbered)
    by_position: dict[tuple[bool, _StepPosition], int] = {}
    by_origin: dict[tuple[int, int], int] = {}
    counts = {True: 0, False: 0}
    events: list[StepEvent] = []
    for part in parts:
        event = part.event
        position = positions.take(event)
        if isinstance(event, Allocate | Collective | HostCopy):
            assert position is not None
            waited = not isinstance(event, Allocate)
            counts[waited] += 1
            by_position[waited, position] = by_origin[part.itself] = counts[waited]
            events.append(changed(event, **{"number" if waited else "block": counts[waited]}))
        elif part.refers is None:
            events.append(event)
        else:
            waits = isinstance(event, Wait)
            if part.refers.segment is not None:
                found = by_position.get((waits, part.refers))
            else:
                found = by_origin.get(part.origin) if part.origin is not None else None
            if found is None:
                raise _Uneven
            events.append(changed(event, **{"number" if waits else "block": found}))
    return tuple(events)


def _deeper_facts(shallow: Facts, deeper: Facts, numbered: _Numbered, blocks: tuple[int, int, int]) -> Facts:
    """Return the facts of the deep model: counts grow linearly, sizes of units are repeated block by block."""
    changes: dict[str, Any] = {}
    for known in fields(Facts):
        one, other = getattr(shallow, known.name), getattr(deeper, known.name)
        if isinstance(one, int) and isinstance(other, int):
            changes[known.name] = one + (other - one) * blocks[-1]
        elif isinstance(one, dict):
            changes[known.name] = _deeper_sizes(one, other, numbered, blocks)
        elif one != other:
            raise _Uneven
    return replace(shallow, **changes)


def _deeper_sizes(
    shallow: dict[str, int], deeper: dict[str, int], numbered: _Numbered, blocks: tuple[int, int, int]
) -> dict[str, int]:
    items = [
        [
            _Item(Free(0), (numbered.split(name)[0],), numbered.split(name)[1], (size,), None, None)
            for name, size in sizes
        ]
        for sizes in (shallow.items(), deeper.items())
    ]
    period, gap, gaps = blocks
    grown: dict[str, int] = {}
    for entry in _aligned(items[0], items[1], period, gap):
        if isinstance(entry, _Chunk):
            for turn in range(gaps):
                for item in entry.items:
                    assert item.number is not None
                    grown[numbered.name(str(item.shape[0]), item.number + turn * gap)] = item.sizes[0]
        else:
            one, other = entry.one, entry.other
            number = None if one.number is None else one.number + ((other.number or 0) - one.number) * gaps
            if one.sizes != other.sizes:
                raise _Uneven
            grown[numbered.name(str(one.shape[0]), number)] = one.sizes[0]
    return grown

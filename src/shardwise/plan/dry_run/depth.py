"""Recordings of deep models from those of shallow ones, where that is exact.

A stack of blocks that are the same holds the engine in a steady state: what one block adds to a step, the next adds
again. So two recordings, the second with one *period* of blocks more than the first, determine a third with any number
of periods more. They are read side by side. Where the deeper one has events that the shallower lacks, that is a
*chunk*: it is repeated, with the blocks' numbers counting on. All else is there once, with sizes on a straight line
over the depth (an optimizer's kernel over all parameters grows evenly).

Nothing is taken on trust. A chunk must be the same as the events before or after it in the deeper recording, but for
block numbers that differ by one period: the steady state is seen, not assumed. And the same construction must give the
deeper recording back from the shallower one, event by event.
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
"""Events that have to agree where two recordings meet again after a chunk."""


_EVERYTHING: tuple[type, ...] = (object,)
_ALLOCATIONS: tuple[type, ...] = (Allocate,)


class _Uneven(Exception):
    """Two recordings differ by more than repeated chunks and even growth."""


def deepened(
    shallow: Recording, deeper: Recording, container: str, period: int, gap: int, gaps: int
) -> Recording | None:
    """What recording the same model with more blocks would give.

    Args:
        shallow: of a model some of whose blocks were left out.
        deeper: of the same with `gap` blocks fewer left out.
        container: fqn of the stack of blocks; they are called by their numbers there.
        period: blocks after which the stack repeats itself.
        gap: a multiple of it.
        gaps: to add to `shallow`, 1 or more.

    Returns:
        None where the two are not of one steady state.
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
    """Names of modules inside one container, taken apart into a block's number and the rest."""

    def __init__(self, container: str) -> None:
        self._pattern = re.compile(rf"({re.escape(container + '.' if container else '')})(\d+)(?=\.|$)(.*)")
        self._known: dict[str, tuple[str, int | None]] = {}

    def split(self, fqn: str) -> tuple[str, int | None]:
        """The name with a placeholder for its block's number, and the number."""
        if fqn not in self._known:
            match = self._pattern.fullmatch(fqn)
            self._known[fqn] = (fqn, None) if match is None else (f"{match[1]}#{match[3]}", int(match[2]))
        return self._known[fqn]

    def name(self, shape: str, number: int | None) -> str:
        """`split`, undone."""
        return shape if number is None else shape.replace("#", str(number), 1)


class _StepPosition(NamedTuple):
    """Where in a step a block of memory was allocated, or a collective or copy was issued."""

    stretch: int
    """Setup is 0, then forwards, backwards and the optimizer, counted on."""
    segment: int | None
    """The number of the block in whose turn it was; None before the first one's, and outside of them."""
    ordinal: int
    """Within that segment; blocks of memory and collectives apart."""


class _Item(NamedTuple):
    """An event, in parts that are compared in different ways."""

    event: StepEvent
    shape: tuple[object, ...]
    """What must be the same."""
    number: int | None
    """Of the block that it names."""
    sizes: tuple[int, ...]
    refers: _StepPosition | None
    """Of the allocation or the collective that it ends or is about."""
    origin: int | None
    """The index of that item."""


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
"""The field that holds a fqn."""
_APART = frozenset({"block", "number", "matmul", "flops", "bytes_moved", "nbytes", "module", "unit"})
_COMPARED: dict[type[StepEvent], tuple[str, ...]] = {
    kind: tuple(known.name for known in fields(kind) if known.name not in _APART) for kind in get_args(StepEvent)
}
"""The fields that must be the same, by event."""


class _StepPositions:
    """Gives each event of a step, in order, its position."""

    def __init__(self, numbered: _Numbered) -> None:
        self._numbered = numbered
        self._stretch = 0
        self._phase = StepPhase.SETUP
        self._segment: int | None = None
        self._counts: Counter[tuple[bool, int, int | None]] = Counter()

    def take(self, event: StepEvent) -> _StepPosition | None:
        """The position of what begins with this event; None where nothing does."""
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
    """An event of both recordings."""

    one: _Item
    other: _Item
    place: int
    """The index of the other."""


class _Chunk(NamedTuple):
    """Events of the deeper recording alone."""

    items: list[_Item]
    start: int
    """The index of the first."""
    step: int
    """By how much block numbers rise from one period to the next: a period's blocks, as many less, or 0 without any."""


@dataclass
class _Alignment:
    """Reads two recordings side by side."""

    shallow: list[_Item]
    deeper: list[_Item]
    period: int
    gap: int

    def __post_init__(self) -> None:
        self._partner: dict[int, int] = {}
        """By index in the shallow one: what it is in the deeper one."""

    def read(self) -> Iterator[_Pair | _Chunk]:
        """What both have and what only the deeper one has, in its order. Raises _Uneven."""
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
        """Events of the deeper one, from `j` on, that the other has not got. None where `i` and `j` are the same event,
        perhaps grown. Raises _Uneven where they are neither."""
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
                for first in (j - lag, j):  # it goes on repeating what stands before it, or is repeated after it
                    step = self._step(first, first + lag, count)
                    if step is not None:
                        return _Chunk(self.deeper[j : j + count], j, step)
        raise _Uneven

    def _meet(self, i: int, j: int, sized: tuple[type, ...]) -> bool:
        """Whether the two recordings go on alike from here, as far as one can see."""
        window = min(_WINDOW, len(self.shallow) - i, len(self.deeper) - j)
        if not window:
            return len(self.shallow) == i and len(self.deeper) == j
        return all(self._same(i + n, j + n, sized, certain=False) for n in range(window))

    def _same(self, i: int, j: int, sized: tuple[type, ...], certain: bool = True) -> bool:
        """Whether two events are one and the same at two depths.

        Args:
            i: in the shallow one.
            j: in the deeper one.
            sized: kinds of events whose sizes must be the same too.
            certain: all before them has been read: what they refer to must be the same as well, inside and outside of
                segments.
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
        """Whether numbers of blocks may be those of the same block, counted from the front or from the back."""
        if one is None or other is None:
            return one is other
        return other - one in {0, self.gap}

    def _step(self, first: int, second: int, count: int) -> int | None:
        """By how much block numbers rise from one part of the deeper recording to another, of so many events. None
        unless they are the same but for that."""
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
                    return None  # a list that is given back last first: which copy gives back what cannot be told
                steps.add(_rise(one.refers.segment, other.refers.segment))
                if one.refers.segment is not None and one.refers.ordinal != other.refers.ordinal:
                    return None
        steps.discard(0)
        if not steps:
            return 0
        return self.period * (1 if self.period in steps else -1) if steps in ({self.period}, {-self.period}) else None


def _rise(one: int | None, other: int | None) -> int | None:
    """From one number to another; none at all where neither is one; None where only one of them is."""
    if one is None or other is None:
        return 0 if one is other else None
    return other - one


def _aligned(shallow: list[_Item], deeper: list[_Item], period: int, gap: int) -> list[_Pair | _Chunk]:
    return list(_Alignment(shallow, deeper, period, gap).read())


# The deep one ---------------------------------------------------------------------------------------------------------


class _UnnumberedEvent(NamedTuple):
    """An event of the deep recording before blocks of memory and collectives are numbered."""

    event: StepEvent
    refers: _StepPosition | None
    origin: tuple[int, int] | None
    """What it refers to, where that is outside of segments: index in the deeper recording, repetition of a chunk."""
    itself: tuple[int, int]


def _built(aligned: list[_Pair | _Chunk], gaps: int, gap: int, numbered: _Numbered) -> tuple[StepEvent, ...]:
    """The events with so many gaps of blocks more than the shallow recording has."""
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
    """Blocks of memory and collectives numbered in the order in which they come. Raises _Uneven where an event refers
    to none."""
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
    """Counts on a straight line; units' sizes block by block."""
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

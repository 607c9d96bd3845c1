"""Arithmetic of intervals: sorted lists of disjoint (start, end)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return what is in any of the intervals, which may overlap and be in any order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif start < end:
            found.append((start, end))
    return found


def without(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return what is in the first and not in the second."""
    found: list[Interval] = []
    position = 0
    for start, end in one:
        while position < len(other) and other[position][1] <= start:
            position += 1
        at, since = position, start
        while at < len(other) and other[at][0] < end:
            if since < other[at][0]:
                found.append((since, other[at][0]))
            since = max(since, other[at][1])
            at += 1
        if since < end:
            found.append((since, end))
    return found


def within(one: Sequence[Interval], start: int, end: int) -> list[Interval]:
    """Return what is between start and end."""
    return [(max(a, start), min(b, end)) for a, b in one if a < end and b > start]


def length(intervals: Iterable[Interval]) -> int:
    """Return the length of disjoint intervals together."""
    return sum(end - start for start, end in intervals)

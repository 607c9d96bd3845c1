"""Ranges [start, stop) of elements or bytes: unions, intersections, gaps and parts of about equal length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Range(NamedTuple):
    """The integers start, start + 1, ..., stop - 1; none where stop <= start."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of elements; 0 where stop <= start."""
        return max(0, self.stop - self.start)


def union(ranges: Iterable[tuple[int, int]]) -> tuple[Range, ...]:
    """Return the union of `ranges` as the fewest ranges, in order. Empty ones are dropped, adjacent ones merged."""
    joined: list[Range] = []
    for start, stop in sorted(Range(*given) for given in ranges):
        if stop <= start:
            continue
        if joined and start <= joined[-1].stop:
            joined[-1] = Range(joined[-1].start, max(joined[-1].stop, stop))
        else:
            joined.append(Range(start, stop))
    return tuple(joined)


def intersection(a: tuple[int, int], b: tuple[int, int]) -> Range:
    """Return the intersection of two ranges; if they do not overlap, an empty range at the later start."""
    start = max(a[0], b[0])
    return Range(start, max(start, min(a[1], b[1])))


def gaps(ranges: Iterable[tuple[int, int]], within: tuple[int, int]) -> tuple[Range, ...]:
    """Return the parts of `within` that no range covers, in order."""
    missing: list[Range] = []
    reached = within[0]
    for start, stop in union(ranges):
        if min(start, within[1]) > reached:
            missing.append(Range(reached, min(start, within[1])))
        reached = max(reached, stop)
    if reached < within[1]:
        missing.append(Range(reached, within[1]))
    return tuple(missing)


def overlaps(ranges: Iterable[tuple[int, int]]) -> tuple[Range, ...]:
    """Return the parts that more than one range covers, as the fewest ranges, in order."""
    twice: list[Range] = []
    reached = 0
    for number, (start, stop) in enumerate(sorted(Range(*given) for given in ranges if given[0] < given[1])):
        if number and start < reached:
            twice.append(Range(start, min(stop, reached)))
        reached = max(reached, stop) if number else stop
    return union(twice)


def share(whole: tuple[int, int], parts: int, index: int) -> Range:
    """Return part `index` of `whole` cut into `parts` consecutive ranges whose lengths differ by at most one.

    Raises ValueError if there is no such part.
    """
    if not 0 <= index < parts:
        raise ValueError(f"part {index} of {parts} does not exist")
    start, stop = Range(*whole)
    length = max(0, stop - start)
    return Range(start + length * index // parts, start + length * (index + 1) // parts)

"""Ranges against sets of integers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout.ranges import Range, gaps, intersection, overlaps, share, union

a_range = st.tuples(st.integers(0, 30), st.integers(0, 30))
some_ranges = st.lists(a_range, max_size=6)


def members(*ranges: tuple[int, int]) -> set[int]:
    return {number for start, stop in ranges for number in range(start, stop)}


def fewest(ranges: tuple[Range, ...]) -> bool:
    return all(r.length for r in ranges) and all(a.stop < b.start for a, b in itertools.pairwise(ranges))


@given(some_ranges)
def test_union(ranges: list[tuple[int, int]]) -> None:
    joined = union(ranges)
    assert members(*joined) == members(*ranges)
    assert fewest(joined)


@given(a_range, a_range)
def test_intersection(a: tuple[int, int], b: tuple[int, int]) -> None:
    shared = intersection(a, b)
    assert members(shared) == members(a) & members(b)
    assert shared.length == len(members(shared))


@given(some_ranges, a_range)
def test_gaps(ranges: list[tuple[int, int]], within: tuple[int, int]) -> None:
    missing = gaps(ranges, within)
    assert members(*missing) == members(within) - members(*ranges)
    assert fewest(missing)


@given(some_ranges)
def test_overlaps(ranges: list[tuple[int, int]]) -> None:
    held = [number for one in ranges for number in range(*one)]
    twice = overlaps(ranges)
    assert members(*twice) == {number for number in held if held.count(number) > 1}
    assert fewest(twice)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 7))
def test_shares_tile_and_are_fair(start: int, length: int, parts: int) -> None:
    shares = [share((start, start + length), parts, index) for index in range(parts)]
    assert shares[0].start == start
    assert shares[-1].stop == start + length
    assert all(a.stop == b.start for a, b in itertools.pairwise(shares))
    assert max(s.length for s in shares) - min(s.length for s in shares) <= 1


def test_there_is_no_part_beyond_the_last() -> None:
    with pytest.raises(ValueError, match="part 2 of 2"):
        share((0, 4), 2, 2)

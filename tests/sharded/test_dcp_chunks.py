"""Conversion of ranges of elements to boxes and back, compared with numpy's indexing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout.ranges import union
from shardwise.sharded.extensions.dcp_chunks import Box, boxes_of, runs_of

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = draw(SHAPES)
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    return shape, Box(offsets, tuple(draw(st.integers(0, s - o)) for s, o in zip(shape, offsets, strict=True)))


def elements(shape: tuple[int, ...], box: Box) -> list[int]:
    """Return the positions of the box's elements in the flattened tensor, by indexing an array."""
    index = tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
    return np.arange(math.prod(shape)).reshape(shape)[index].reshape(-1).tolist()


@given(ranges())
def test_boxes_hold_a_range_in_order(given_: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = given_
    found = boxes_of(shape, start, stop)
    assert [position for box in found for position in elements(shape, box)] == list(range(start, stop))
    assert all(box.numel for box in found)
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(boxes())
def test_runs_hold_a_box_in_order(given_: tuple[tuple[int, ...], Box]) -> None:
    shape, box = given_
    found = list(runs_of(shape, box))
    assert [position for run in found for position in range(*run)] == elements(shape, box)
    assert union(found) == tuple(found)  # the fewest


def test_a_fragment_that_begins_and_ends_inside_rows() -> None:
    assert boxes_of((4, 5), 3, 17) == (Box((0, 3), (1, 2)), Box((1, 0), (2, 5)), Box((3, 0), (1, 2)))
    assert boxes_of((), 0, 1) == (Box((), ()),)
    assert boxes_of((3, 0), 0, 0) == ()


def test_what_is_not_there_is_refused() -> None:
    for start, stop in ((-1, 2), (3, 2), (0, 7)):
        with pytest.raises(ValueError, match="not all in a tensor of 6"):
            boxes_of((2, 3), start, stop)
    for box in (Box((0, 2), (2, 2)), Box((-1, 0), (1, 1)), Box((0,), (2,))):
        with pytest.raises(ValueError, match="does not lie in"):
            list(runs_of((2, 3), box))

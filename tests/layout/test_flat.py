"""Flat layouts and fragments against a reference that writes every element down."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.fsdp.layout import FlatLayout, Fragment, build_layout, round_up

Shapes = list[tuple[int, ...]]

shapes_of_parameters = st.lists(
    st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=6
)  # 0-d, empty and indivisible ones among them
layouts = st.builds(
    lambda shapes, world_size, align: (build_layout(_named(shapes), world_size, align), shapes, align),
    shapes_of_parameters,
    st.integers(1, 7),
    st.sampled_from([1, 2, 4, 8, 16]),
)


def _named(shapes: Shapes) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"p{index}", shape) for index, shape in enumerate(shapes)]


def naive_buffer(shapes: Shapes, world_size: int, align: int) -> list[tuple[int, int] | None]:
    """Position by position: (parameter, element) or None for a gap."""
    buffer: list[tuple[int, int] | None] = []
    for index, shape in enumerate(shapes):
        while len(buffer) % align:
            buffer.append(None)
        buffer += [(index, element) for element in range(math.prod(shape))]
    while len(buffer) % (world_size * align):
        buffer.append(None)
    return buffer


@given(layouts)
def test_every_element_is_where_the_reference_has_it(case: tuple[FlatLayout, Shapes, int]) -> None:
    layout, shapes, align = case
    buffer = naive_buffer(shapes, layout.world_size, align)
    assert layout.numel == len(buffer)
    assert layout.used_numel == sum(place is not None for place in buffer)
    for index, entry in enumerate(layout.entries):
        assert entry.shape == shapes[index]
        assert buffer[entry.start : entry.stop] == [(index, element) for element in range(entry.numel)]


@given(layouts)
def test_fragments_are_what_a_ranks_slice_holds(case: tuple[FlatLayout, Shapes, int]) -> None:
    layout, shapes, align = case
    buffer = naive_buffer(shapes, layout.world_size, align)
    for rank in range(layout.world_size):
        start, stop = layout.slice_of(rank)
        own = buffer[start:stop]
        for index, fragment in enumerate(layout.fragments(rank)):
            assert fragment == layout.fragment(index, rank)
            held = [place[1] for place in own if place is not None and place[0] == index]
            assert held == list(range(fragment.start, fragment.stop))
            assert own[fragment.offset : fragment.offset + fragment.numel] == [(index, element) for element in held]


@given(layouts)
def test_fragments_tile_each_parameter_in_rank_order(case: tuple[FlatLayout, Shapes, int]) -> None:
    layout, _, _ = case
    for index, entry in enumerate(layout.entries):
        pieces = [f for r in range(layout.world_size) if (f := layout.fragment(index, r)).numel]
        stops = [0, *(piece.stop for piece in pieces)]
        assert [piece.start for piece in pieces] == stops[:-1]
        assert stops[-1] == entry.numel


@given(layouts)
def test_starts_are_aligned_and_padding_is_less_than_a_rank_and_a_gap_each(
    case: tuple[FlatLayout, Shapes, int],
) -> None:
    layout, shapes, align = case
    assert all(entry.start % align == 0 for entry in layout.entries)
    assert layout.shard_numel % align == 0
    assert layout.shard_numel * layout.world_size == layout.numel
    assert layout.numel - layout.used_numel <= align * layout.world_size + (align - 1) * len(shapes)


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_round_up(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple


def test_an_empty_fragment_is_the_empty_range() -> None:
    layout = build_layout([("a", (4,)), ("b", ()), ("c", (0, 3))], world_size=2, align=4)
    assert layout.fragment(1, 0) == Fragment("b", 0, 0, 0)
    assert layout.fragment(1, 1) == Fragment("b", 0, 1, 0)
    assert layout.fragment(2, 0).numel == layout.fragment(2, 1).numel == 0


@pytest.mark.parametrize(("world_size", "align"), [(0, 1), (1, 0), (-1, 4)])
def test_impossible_sizes_raise(world_size: int, align: int) -> None:
    with pytest.raises(ValueError, match=f"{world_size} and {align}"):
        build_layout([("a", (3,))], world_size, align)


@settings(max_examples=20)
@given(shapes_of_parameters, st.sampled_from([1, 4, 8]))
def test_a_layouts_parameters_lie_alike_at_every_world_size(shapes: Shapes, align: int) -> None:
    """What a checkpoint relies on to be read at another number of ranks: only the cuts move."""
    for one, other in itertools.pairwise(build_layout(_named(shapes), n, align) for n in range(1, 6)):
        assert one.entries == other.entries

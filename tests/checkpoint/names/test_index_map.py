"""Maps between flattened tensors, against numpy arrays of element numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.names.index_map import LONG_RUN, MOST_RUNS, IndexMap, Strided, tile

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@st.composite
def maps(draw: st.DrawFn, here_numel: int | None = None) -> tuple[IndexMap, dict[int, int]]:
    """A map as conversions make them: blocks of one tensor, shuffled, some left out."""
    numel = draw(st.integers(0, 30)) if here_numel is None else here_numel
    cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=6))})
    blocks = [range(a, b) for a, b in itertools.pairwise(cuts)]
    shuffled = draw(st.permutations(blocks))
    kept = [block for block in shuffled if draw(st.integers(0, 4))]
    table: dict[int, int] = {}
    for block in kept:
        place = len(table)
        table.update({element: place + k for k, element in enumerate(block)})
    parts = [IndexMap.one(len(block), block[0], table[block[0]]) for block in kept if len(block)]
    return (IndexMap.joined(parts) if parts else IndexMap.one(0)), table


def naive(runs: IndexMap) -> dict[int, int]:
    return {here + k: there + k for here, there, length in runs.tuples() for k in range(length)}


@given(maps())
def test_runs_say_what_the_table_says(case: tuple[IndexMap, dict[int, int]]) -> None:
    runs, table = case
    assert naive(runs) == table
    assert runs.numel == len(table)
    assert naive(runs.inverse()) == {there: here for here, there in table.items()}
    assert runs.elements().tolist() == [table[here] for here in sorted(table)]
    assert all(tile([runs], n) == (sorted(table) == list(range(n))) for n in range(len(table) + 2))


@given(maps())
def test_neighbours_that_continue_each_other_are_one_run(case: tuple[IndexMap, dict[int, int]]) -> None:
    tuples = case[0].tuples()
    assert tuples == sorted(tuples)
    for (here, there, length), after in itertools.pairwise(tuples):
        assert (here + length, there + length) != after[:2]
        assert length > 0


@given(maps(), st.integers(-2, 32), st.integers(-2, 32))
def test_within(case: tuple[IndexMap, dict[int, int]], start: int, stop: int) -> None:
    runs, table = case
    assert naive(runs.within(start, stop)) == {h: t for h, t in table.items() if start <= h < stop}
    assert naive(runs.moved(3, 5)) == {h + 3: t + 5 for h, t in table.items()}


@given(maps(), st.integers(1, 9))
def test_stretches_have_no_gaps(case: tuple[IndexMap, dict[int, int]], most: int) -> None:
    runs, table = case
    seen: dict[int, int] = {}
    for part in runs.stretches(most):
        own = naive(part)
        assert list(own) == list(range(min(own), min(own) + len(own)))
        assert len(own) == most or max(own) + 1 not in table or (max(own) + 1 - min(own)) % most == 0
        seen.update(own)
    assert list(seen.items()) == sorted(table.items())


@given(maps(20), maps(20))
def test_through(first: tuple[IndexMap, dict[int, int]], second: tuple[IndexMap, dict[int, int]]) -> None:
    expected = {here: second[1][there] for here, there in first[1].items() if there in second[1]}
    assert naive(first[0].through(second[0])) == expected


@given(SIZES, st.data())
def test_paired_strides(sizes: list[int], data: st.DataObject) -> None:
    """Any transposition of any slice, on both sides."""
    sides, arrays = [], []
    for _ in range(2):
        order = data.draw(st.permutations(range(len(sizes))))
        wider = [size + data.draw(st.integers(0, 2)) for size in sizes]
        whole = np.arange(math.prod(wider)).reshape([wider[dim] for dim in order]).transpose(np.argsort(order))
        view = whole[tuple(slice(have - want, None) for have, want in zip(wider, sizes, strict=True))]
        arrays.append(view)
        sides.append(Strided(int(view.flat[0]), tuple(stride // view.itemsize for stride in view.strides)))
    runs = IndexMap.paired(sizes, *sides)
    assert naive(runs) == dict(zip(arrays[0].reshape(-1).tolist(), arrays[1].reshape(-1).tolist(), strict=True))


def test_what_moves_together_is_one_run() -> None:
    assert IndexMap.paired((3, 4, 5), Strided(0, (20, 5, 1)), Strided(7, (20, 5, 1))).tuples() == [(0, 7, 60)]
    assert IndexMap.paired((3, 4), Strided(0, (4, 1)), Strided(8, (8, 1))).tuples() == [
        (0, 8, 4),
        (4, 16, 4),
        (8, 24, 4),
    ]
    assert IndexMap.paired((), Strided(2, ()), Strided(0, ())).tuples() == [(2, 0, 1)]
    assert IndexMap.paired((0, 4), Strided(0, (4, 1)), Strided(0, (4, 1))).tuples() == []


def test_what_is_cut_too_fine_or_overlaps_is_refused() -> None:
    rows = MOST_RUNS // 2 + 1
    with pytest.raises(ValueError, match=f"cut into {2 * rows:,} pieces"):
        IndexMap.paired((rows, 2), Strided(0, (2, 1)), Strided(0, (1, rows)))
    with pytest.raises(ValueError, match=f"cut into {2 * rows:,} pieces of {LONG_RUN - 1} elements"):
        interleaved(rows, LONG_RUN - 1)
    with pytest.raises(ValueError, match="elements overlap"):
        IndexMap.paired((3, 2), Strided(0, (2, 1)), Strided(0, (0, 1)))
    with pytest.raises(ValueError, match="elements overlap"):
        IndexMap.joined([IndexMap.one(3), IndexMap.one(3, here=2, there=9)])


def interleaved(rows: int, length: int) -> IndexMap:
    """Of a matrix of 2 `rows` rows: its two halves to every other row."""
    return IndexMap.paired(
        (2, rows, length), Strided(0, (rows * length, length, 1)), Strided(0, (length, 2 * length, 1))
    )


def test_of_long_rows_there_may_be_any_number() -> None:
    """As of the experts of Inkling: a stack of 256 with 6144 rows each."""
    rows = MOST_RUNS // 2 + 1
    runs = interleaved(rows, LONG_RUN)
    assert (len(runs), runs.numel) == (2 * rows, 2 * rows * LONG_RUN)
    assert runs.within(LONG_RUN, 3 * LONG_RUN).tuples() == [
        (LONG_RUN, 2 * LONG_RUN, LONG_RUN),
        (2 * LONG_RUN, 4 * LONG_RUN, LONG_RUN),
    ]

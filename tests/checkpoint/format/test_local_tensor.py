"""Elements of pieces, as they are copied by runs."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.format import local_tensor
from shardwise.checkpoint.format.local_tensor import copy_runs
from shardwise.checkpoint.names.index_map import IndexMap


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 3), st.integers(0, 30), st.integers(1, 30), st.booleans())
def test_a_range_of_rows_that_are_cut(
    rows: int, width: int, apart: int, start: int, numel: int, there_too: bool
) -> None:
    """Elements [start, start + numel) of a matrix whose rows are `apart` in the source, and perhaps in the target."""
    far = np.arange(rows, dtype=np.int64) * (width + apart)
    near = np.arange(rows, dtype=np.int64) * width
    runs = IndexMap(far, far if there_too else near, np.full(rows, width, dtype=np.int64))
    _same(runs.within(start, start + numel))


@given(st.permutations(range(100)), st.integers(1, 4), st.integers(0, 2))
def test_runs_in_any_order(order: list[int], width: int, apart: int) -> None:
    here = np.arange(100, dtype=np.int64) * (width + apart)
    runs = IndexMap(here, np.array(order, dtype=np.int64) * (width + 1), np.full(100, width, dtype=np.int64))
    assert len(runs) > local_tensor._FEW_RUNS
    assert _same(runs) > 0 or order == sorted(order)


def _same(runs: IndexMap) -> int:
    source = torch.arange(1000)[7:]  # not at the beginning of its storage
    target, expected = (torch.full((1000,), -1)[3:] for _ in range(2))
    staged_bytes = copy_runs(source, target, runs)
    for here, there, length in runs.tuples():
        expected[there : there + length] = source[here : here + length]
    assert torch.equal(target, expected)
    return staged_bytes


def test_parts_with_gaps_in_them() -> None:
    runs = IndexMap(*(np.array(side, dtype=np.int64) for side in ([0, 6, 20], [0, 3, 6], [3, 3, 3])))
    assert [part.tuples() for part in runs.stretches(100, gap=3)] == [[(0, 0, 3), (6, 3, 3)], [(20, 6, 3)]]
    assert [part.tuples() for part in runs.stretches(7, gap=14)] == [
        [(0, 0, 3), (6, 3, 1)],
        [(7, 4, 2)],
        [(20, 6, 1)],
        [(21, 7, 2)],
    ]

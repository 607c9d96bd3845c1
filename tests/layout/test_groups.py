"""Groups of ranks against their definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout.groups import consecutive_groups, hybrid_groups


@given(st.integers(1, 12), st.integers(1, 12))
def test_hybrid_groups_are_the_rows_and_columns_of_a_grid(replicas: int, shard_size: int) -> None:
    world_size = replicas * shard_size
    groups = hybrid_groups(world_size, shard_size)
    grid = [[row * shard_size + column for column in range(shard_size)] for row in range(replicas)]
    assert groups.shard == tuple(map(tuple, grid))
    assert groups.replicate == tuple(zip(*grid, strict=True))


@given(st.integers(1, 12), st.integers(1, 12))
def test_each_rank_is_in_one_group_of_either_kind_and_the_two_share_only_it(replicas: int, shard_size: int) -> None:
    world_size = replicas * shard_size
    groups = hybrid_groups(world_size, shard_size)
    for rank in range(world_size):
        (shard,) = (group for group in groups.shard if rank in group)
        (replicate,) = (group for group in groups.replicate if rank in group)
        assert set(shard) & set(replicate) == {rank}


@given(st.integers(1, 30), st.integers(-3, 40))
def test_sizes_that_do_not_divide_raise(world_size: int, size: int) -> None:
    if size >= 1 and world_size % size == 0:
        assert consecutive_groups(world_size, size)[0] == tuple(range(size))
        return
    for make in (consecutive_groups, hybrid_groups):
        with pytest.raises(ValueError, match=f"groups of {size} ranks do not divide {world_size} ranks"):
            make(world_size, size)

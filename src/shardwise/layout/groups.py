"""Which ranks form shard groups and replicate groups: arithmetic on rank numbers."""

from __future__ import annotations

from typing import NamedTuple


class HybridGroups(NamedTuple):
    """Every group of a (replicate, shard) mesh; each rank is in one shard group and in one replicate group."""

    shard: tuple[tuple[int, ...], ...]
    replicate: tuple[tuple[int, ...], ...]


def hybrid_groups(world_size: int, shard_size: int) -> HybridGroups:
    """Return the groups of a mesh: `shard_size` consecutive ranks are a shard group, ranks at the same position of
    different shard groups are a replicate group.

    Raises ValueError if `shard_size` does not divide `world_size`.
    """
    shard = consecutive_groups(world_size, shard_size)
    replicate = tuple(tuple(range(first, world_size, shard_size)) for first in range(shard_size))
    return HybridGroups(shard, replicate)


def consecutive_groups(world_size: int, size: int) -> tuple[tuple[int, ...], ...]:
    """Return (0..size-1), (size..2*size-1), ... Raises ValueError if `size` does not divide `world_size`."""
    if size < 1 or world_size % size:
        raise ValueError(f"groups of {size} ranks do not divide {world_size} ranks")
    return tuple(tuple(range(first, first + size)) for first in range(0, world_size, size))

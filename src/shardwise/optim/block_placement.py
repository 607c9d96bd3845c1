"""Where a tensor with one element for each block of a sharded parameter's elements lives."""

from __future__ import annotations

from shardwise.fsdp.layout import Entry, FlatLayout
from shardwise.fsdp.sharded_parameter import Placement


def cuts_at(placement: Placement, numel: int) -> bool:
    """Whether every rank's piece of a tensor begins at a multiple of `numel` elements. The same on every rank."""
    layout = placement.layout
    start = layout.entries[placement.index].start
    return layout.world_size == 1 or (start % numel == 0 and layout.shard_numel % numel == 0)


def of_blocks(placement: Placement, numel: int) -> Placement:
    """Return the placement of a tensor with one element for each block of `numel` elements of another tensor, for which
    `cuts_at` holds. Each element is on the rank that has the block."""
    layout = placement.layout
    entry = layout.entries[placement.index]
    count, start = -(-entry.numel // numel), entry.start // numel
    if layout.world_size == 1:
        start, total = 0, count
    else:
        total = layout.numel // numel
    blocks = FlatLayout((Entry(entry.fqn, (count,), start, count),), total, layout.world_size)
    return Placement(blocks, 0, placement.shard_group, placement.replicas)

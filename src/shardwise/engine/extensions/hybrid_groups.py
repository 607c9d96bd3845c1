"""Groups of ranks beside one that holds all: shard groups with replicas, and parts of a shard group."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import MeshError
from shardwise.fsdp.mesh import Groups
from shardwise.fsdp.strategy import Strategy
from shardwise.layout.groups import consecutive_groups, hybrid_groups


def groups_of(strategy: Strategy, mesh: DeviceMesh | None) -> Groups | None:
    """Return a hybrid strategy's groups: a mesh's (replicate, shard) axes, else one shard group per host. None for
    other strategies. Every rank must call this, unless there is a mesh."""
    if not (strategy.replicated and strategy.sharded):
        return None
    if mesh is None:
        return _per_host(dist.get_world_size())
    if mesh.ndim != 2:
        raise MeshError(
            f"strategy {strategy.value!r} needs a mesh of 2 axes (replicate, shard); this one has {mesh.ndim}: {mesh}"
        )
    return mesh.get_group(1), mesh.get_group(0)


def secondary_group(shard: dist.ProcessGroup, size: int) -> dist.ProcessGroup | None:
    """Return this rank's part of a shard group, `size` consecutive ranks, over which units are resharded after forward;
    None for parts of one rank. Every rank of the group must call this; of the world, if that is the group.

    Raises:
        MeshError: `size` does not divide the group.
    """
    try:
        positions = consecutive_groups(shard.size(), size)
    except ValueError:
        raise MeshError(
            f"reshard_after_forward={size} does not divide the shard group of {shard.size()} ranks; "
            f"use one of {[n for n in range(1, shard.size()) if shard.size() % n == 0]}"
        ) from None
    ranks = dist.get_process_group_ranks(shard)
    groups = [[ranks[i] for i in group] for group in positions]
    if shard is dist.group.WORLD:
        return _own_group(groups)
    # Only its members create it: ranks outside the shard group need not call sw.shard at all.
    own = next(group for group in groups if dist.get_rank() in group)
    return dist.new_group(own, use_local_synchronization=True) if size > 1 else None


def _per_host(world_size: int) -> Groups:
    size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if size < 1 or world_size % size:
        raise MeshError(
            f"a hybrid strategy shards inside each host, but {size} ranks per host do not divide {world_size} ranks; "
            "pass mesh= with axes (replicate, shard)"
        )
    groups = hybrid_groups(world_size, size)
    return _own_group(groups.shard), _own_group(groups.replicate)


def _own_group(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Create every group (all ranks must) and return the one this rank is in; None for a group of one."""
    own = None
    for ranks in groups:
        if len(ranks) > 1:
            group = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                own = group
    return own

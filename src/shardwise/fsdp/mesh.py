"""The groups of ranks that one sharded model exchanges bytes over."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise import accelerators
from shardwise.errors import MeshError
from shardwise.fsdp.collectives import Collectives
from shardwise.fsdp.strategy import Strategy
from shardwise.fsdp.torch_collectives import DryCollectives, collectives_for
from shardwise.registry import registered

Spans = tuple[tuple[int, ...], tuple[int, ...]]
"""Global ranks of this rank's shard group and replicate group, in order."""
Groups = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]
"""A shard group and a replicate group of torch's. None: this rank alone."""
GROUPS = "groups"
"""Functions that are asked first for the groups of a strategy: (strategy, mesh: DeviceMesh | None) -> Groups | None."""
SECONDARY_GROUP = "secondary group"
"""The function that makes one: (shard group, size: int) -> dist.ProcessGroup | None. Every rank calls it."""


@dataclass(frozen=True, eq=False)
class Mesh:
    """A shard group and a replicate group. A group of one rank moves nothing."""

    shard: Collectives
    """Ranks that hold different slices of one copy."""
    replicate: Collectives
    """Ranks that hold the same slice of different copies."""
    device: torch.device
    spans: Spans = ((0,), (0,))
    secondary: Collectives | None = None
    """A part of the shard group, over which units are resharded after forward."""
    secondary_size: int | None = None
    """Number of ranks in such a part, as `sw.shard` was told; None if it was not."""

    @property
    def world_size(self) -> int:
        return self.shard.world_size * self.replicate.world_size

    @property
    def groups(self) -> tuple[Collectives, ...]:
        """Every group that exchanges bytes."""
        return tuple(group for group in (self.shard, self.replicate, self.secondary) if group is not None)

    @property
    def is_dry(self) -> bool:
        """Whether bytes for other ranks go nowhere: one process plays one rank of a larger world, or is alone."""
        return all(group.name == "dry" for group in (self.shard, self.replicate))

    def describe(self) -> str:
        text = f"{self.shard.world_size}-way shards"
        return f"{text} x {self.replicate.world_size} replicas" if self.replicate.world_size > 1 else text


def build_mesh(
    strategy: Strategy, mesh: DeviceMesh | Mesh | None, secondary_size: int | None, device: torch.device | None
) -> Mesh:
    """Make the groups that `strategy` needs. Every rank must call this.

    Args:
        mesh: data axes only: 1 axis = shard; 2 axes = (replicate, shard). None: all ranks, or for hybrid strategies
            one shard group per host. A `Mesh` (the planner makes its own) is returned as it is.
        secondary_size: number of ranks in a group for resharding after forward; must divide the shard group.
    Raises:
        MeshError: the strategy, the mesh and the number of ranks do not fit together; or there is no process group
            although torchrun started several ranks.
    """
    if isinstance(mesh, Mesh):
        return mesh
    initialized = dist.is_available() and dist.is_initialized()
    if mesh is None and not initialized:
        _check_alone()
    world_size = dist.get_world_size() if initialized else 1
    device = device or _device_for(mesh)
    if world_size == 1 and mesh is None:
        return Mesh(_alone(device), _alone(device), device, secondary_size=secondary_size)
    shard, replicate = _groups_of(strategy, mesh)
    over_shard = _alone(device) if shard is None else collectives_for(shard, device)
    over_replicas = _alone(device) if replicate is None else collectives_for(replicate, device)
    secondary = None
    if secondary_size is not None and over_shard.world_size not in {1, secondary_size}:
        (make,) = registered(SECONDARY_GROUP)
        secondary = collectives_for(make(shard, secondary_size), device)
    return Mesh(over_shard, over_replicas, device, _spans(shard, replicate), secondary, secondary_size)


def _groups_of(strategy: Strategy, mesh: DeviceMesh | None) -> Groups:
    """Return this rank's groups. Every rank must call this, unless there is a mesh."""
    for choose in registered(GROUPS):
        found: Groups | None = choose(strategy, mesh)
        if found is not None:
            return found
    if strategy.sharded and strategy.replicated:
        raise MeshError(f"strategy {strategy.value!r} needs groups of two kinds, which nothing attached makes")
    if mesh is not None and mesh.ndim != 1:
        raise MeshError(f"strategy {strategy.value!r} needs a mesh of 1 axis; this one has {mesh.ndim}: {mesh}")
    group = dist.group.WORLD if mesh is None else mesh.get_group(0)
    return (group, None) if strategy.sharded else (None, group)


def _device_for(mesh: DeviceMesh | None) -> torch.device:
    """Return the device of this rank: of the mesh's kind, or without a mesh the one that the process group's backend
    serves."""
    if mesh is None:
        try:
            return accelerators.of_group(dist.group.WORLD if dist.is_initialized() else None)
        except ValueError as error:
            raise MeshError(f"ranks have no device: {error}") from None
    try:
        device = accelerators.of_kind(mesh.device_type)
    except ValueError as error:
        raise MeshError(f"the mesh needs {mesh.device_type} devices: {error}") from None
    unserved = [group for group in mesh.get_all_groups() if not accelerators.serves(group, device.type)]
    if unserved:
        raise MeshError(
            f"the mesh has {device.type} devices, which its process group's backend "
            f"{dist.get_backend(unserved[0])!r} does not support: call"
            f' init_process_group("{accelerators.backend_for(device)}"), or make a mesh of "cpu"'
        )
    return device


def _check_alone() -> None:
    """Raise MeshError if a launcher started several ranks: without a process group each would train a model of its
    own."""
    rank, ranks = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "")
    if rank is not None and ranks.isdecimal() and int(ranks) > 1:
        raise MeshError(
            f"RANK={rank} and WORLD_SIZE={ranks} are set, as torchrun sets them, but there is no process group, so "
            f"each of the {ranks} ranks would train a model of its own: call "
            "torch.distributed.init_process_group(...) before sw.shard (or unset WORLD_SIZE, if that is what you want)"
        )


def spans_of(strategy: Strategy, mesh: DeviceMesh | Mesh) -> Spans:
    """Return the ranks that `build_mesh` would put into groups. No communication. Raises MeshError as that does."""
    return mesh.spans if isinstance(mesh, Mesh) else _spans(*_groups_of(strategy, mesh))


def _spans(shard: dist.ProcessGroup | None, replicate: dist.ProcessGroup | None) -> Spans:
    alone = (dist.get_rank(),)
    over_shard, over_replicas = (tuple(dist.get_process_group_ranks(g)) if g else alone for g in (shard, replicate))
    return over_shard, over_replicas


def _alone(device: torch.device) -> Collectives:
    return DryCollectives(0, 1, device)

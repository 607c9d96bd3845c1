"""The groups of ranks that one sharded model exchanges bytes over, and what they agree on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise import accelerators
from shardwise.errors import MeshError
from shardwise.fsdp.collectives import Collectives
from shardwise.fsdp.strategy import Strategy
from shardwise.fsdp.torch_collectives import DryCollectives, collectives_for
from shardwise.registry import first_answer, registered

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
    def reducing(self) -> Collectives:
        """The group that sums gradients first. With shards of one rank nothing is scattered, and replicas sum whole
        gradients."""
        return self.replicate if self.shard.world_size == 1 else self.shard

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
        MeshError: the strategy, the mesh and the number of ranks do not fit together.
    """
    if isinstance(mesh, Mesh):
        return mesh
    initialized = dist.is_available() and dist.is_initialized()
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
    attached: Groups | None = first_answer(GROUPS, strategy, mesh)
    if attached is not None:
        return attached
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


def spans_of(strategy: Strategy, mesh: DeviceMesh | Mesh) -> Spans:
    """Return the ranks that `build_mesh` would put into groups. No communication. Raises MeshError as that does."""
    return mesh.spans if isinstance(mesh, Mesh) else _spans(*_groups_of(strategy, mesh))


def _spans(shard: dist.ProcessGroup | None, replicate: dist.ProcessGroup | None) -> Spans:
    alone = (dist.get_rank(),)
    over_shard, over_replicas = (tuple(dist.get_process_group_ranks(g)) if g else alone for g in (shard, replicate))
    return over_shard, over_replicas


def _alone(device: torch.device) -> Collectives:
    return DryCollectives(0, 1, device)


# Agreement ------------------------------------------------------------------------------------------------------------

FIRST_UNIT_LABEL = 16
"""Smaller labels are for other purposes than gathering and reducing a unit."""


class Agreement:
    """What one model's ranks tell each other between their hosts. None of it waits for a device."""

    def __init__(self, mesh: Mesh) -> None:
        self.groups = [group for group in (mesh.shard, mesh.replicate) if group.world_size > 1]
        """Those whose ranks must agree."""

    @staticmethod
    def gather_label(unit_index: int) -> int:
        """Return the label of a collective that gathers the unit."""
        return FIRST_UNIT_LABEL + 2 * unit_index

    @staticmethod
    def reduce_label(unit_index: int) -> int:
        """Return the label of a collective that reduces the unit's gradients."""
        return FIRST_UNIT_LABEL + 2 * unit_index + 1

    def note(self, label: int) -> None:
        """Note that this rank issues a collective with this label. No communication."""

    def greatest(self, flags: bytes) -> bytes:
        """Return the elementwise maximum of all ranks' flags, at the end of a backward. Every rank must call this."""
        for group in self.groups:
            flags = group.exchange(flags, greatest_of)
        return flags


def greatest_of(left: bytes, right: bytes) -> bytes:
    """Return the elementwise maximum of two messages of one length."""
    both = (np.frombuffer(text, dtype=np.uint8) for text in (left, right))
    return np.maximum(*both).tobytes()

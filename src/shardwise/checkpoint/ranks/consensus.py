"""The ranks of a mesh as they save and load together."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from shardwise.checkpoint.ranks.agreement import Agreement
from shardwise.comm.together import OverGroups
from shardwise.errors import UsageError
from shardwise.fsdp.collectives import Collectives
from shardwise.fsdp.engine import Engine
from shardwise.fsdp.mesh import Mesh


def mesh_of(engines: Sequence[Engine]) -> Mesh:
    """Return the mesh over whose ranks a model with these engines is saved and loaded: one with several shards and
    several replicas, if there is one.

    Raises UsageError if engines are over different ranks, or divide the same ranks into several shards and replicas
    differently.
    """
    meshes = [engine.mesh for engine in engines]
    chosen = next((mesh for mesh in meshes if not _is_one_group(mesh)), meshes[0])
    for mesh in meshes:
        fits = mesh.world_size == chosen.world_size and _is_one_group(mesh) and _ranks(mesh) >= _ranks(chosen)
        if mesh.spans != chosen.spans and not fits:
            raise UsageError(
                f"parts of this model are sharded over different ranks ({chosen.describe()}, {mesh.describe()}; "
                f"with this rank {sorted(_ranks(chosen))}, {sorted(_ranks(mesh))}): save and load each part by "
                "itself"
            )
    return chosen


def _is_one_group(mesh: Mesh) -> bool:
    """Return whether the mesh's ranks are all shards, or all replicas."""
    return 1 in {mesh.shard.world_size, mesh.replicate.world_size}


def _ranks(mesh: Mesh) -> set[int]:
    """Return the ranks of the two groups that this rank is in."""
    return {rank for group in mesh.spans for rank in group}


def axes_of(engines: Sequence[Engine]) -> tuple[Collectives, ...]:
    """Return the axes of the tensor mesh that parameters are on, besides the mesh of their engines: mostly none.

    Raises UsageError if parameters are on different ones.
    """
    groups = (group for engine in engines for unit in engine.units for group in unit.groups)
    found = {group.axes for group in groups if group.axes and group.mesh is None}  # experts are on ranks of the mesh
    if len(found) > 1:
        raise UsageError(
            "parameters of this model are DTensors on different meshes: save and load the parts of each mesh by "
            "themselves"
        )
    return next(iter(found), ())


class Peers(Agreement, OverGroups):
    """All ranks of some engines, replicas and the axes of a tensor mesh included. Every method is collective."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._mesh = mesh = mesh_of(engines)
        self.axes = axes_of(engines)
        """Of the tensor mesh."""
        super().__init__((mesh.shard, mesh.replicate, *self.axes))
        self.device = mesh.device
        if mesh.is_dry and mesh.world_size > 1:
            raise UsageError("a dry run has no weights: save and load checkpoints on real ranks")

    def copy_of(self, ranks: int, axes: Sequence[Collectives]) -> tuple[int, int]:
        """Return this rank's number among those that hold the same elements of a tensor, and how many they are. Not
        collective. `ranks`, `axes`: the tensor is spread over so many ranks of the mesh, and over these axes; or over
        all ranks."""
        mesh, experts = self._mesh, math.prod(axis.world_size for axis in axes if axis not in self.axes)
        if ranks == self.world_size:
            return 0, 1
        if ranks * experts == mesh.world_size:
            number, copies = 0, 1
        elif ranks == 1:  # every rank is a replica, or every one with the same experts, which alternate
            number = (mesh.shard.rank + mesh.shard.world_size * mesh.replicate.rank) // experts
            copies = mesh.world_size // experts
        else:
            number, copies = mesh.replicate.rank, mesh.replicate.world_size
        for axis in self.axes:
            if axis not in axes:
                number, copies = number + copies * axis.rank, copies * axis.world_size
        return number, copies

    @property
    def reads_alone(self) -> bool:
        """Whether no other rank of this machine holds, and so reads, the same elements, as far as torchrun's
        environment tells."""
        local_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)))
        machines = [rank // local_ranks for rank in self._mesh.spans[1]]
        return len(set(machines)) == len(machines)

"""The ranks of a mesh as they save and load together."""

from __future__ import annotations

import os
from collections.abc import Sequence

from shardwise.checkpoint.ranks.agreement import Agreement
from shardwise.comm.together import OverGroups
from shardwise.errors import UsageError
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


class Peers(Agreement, OverGroups):
    """All ranks of a mesh, replicas included. Every method is collective."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__((mesh.shard, mesh.replicate))
        self._mesh = mesh
        self.replicas = mesh.replicate.world_size
        self.replica = mesh.replicate.rank
        self.device = mesh.device
        if mesh.is_dry and mesh.world_size > 1:
            raise UsageError("a dry run has no weights: save and load checkpoints on real ranks")

    @property
    def reads_alone(self) -> bool:
        """Whether no other rank of this machine holds, and so reads, the same elements, as far as torchrun's
        environment tells."""
        local_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)))
        machines = [rank // local_ranks for rank in self._mesh.spans[1]]
        return len(set(machines)) == len(machines)

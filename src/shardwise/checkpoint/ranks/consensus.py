"""The ranks of a mesh as they save and load together."""

from __future__ import annotations

import os

import torch

from shardwise.checkpoint.ranks.agreement import Agreement
from shardwise.engine.mesh import Mesh
from shardwise.errors import UsageError


class Peers(Agreement):
    """All ranks of a mesh, replicas included. Every method is collective."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh.replicate.rank * mesh.shard.world_size + mesh.shard.rank, mesh.world_size)
        self._mesh = mesh
        self.replicas = mesh.replicate.world_size
        self.replica = mesh.replicate.rank
        if mesh.is_dry and mesh.world_size > 1:
            raise UsageError("a dry run has no weights: checkpoints are saved and loaded by real ranks")

    @property
    def reads_alone(self) -> bool:
        """Whether no other rank of this machine holds, and so reads, the same elements; as far as torchrun tells."""
        local_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)))
        machines = [rank // local_ranks for rank in self._mesh.spans[1]]
        return len(set(machines)) == len(machines)

    def _highest(self, numbers: list[int]) -> list[int]:
        values = torch.tensor(numbers, dtype=torch.int64, device=self._mesh.device)
        self._mesh.shard.all_reduce(values, "max").wait()
        self._mesh.replicate.all_reduce(values, "max").wait()
        return [int(value) for value in values.tolist()]

"""Optimizer state of whole matrices: tensors of any shape on the owner, and pieces without elements on other ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import UsageError
from shardwise.fsdp.collectives import FINISHED, Collectives, Work
from shardwise.fsdp.layout import Entry, FlatLayout
from shardwise.fsdp.mesh import Mesh
from shardwise.fsdp.sharded_parameter import Placement, ShardedParameter
from shardwise.fsdp.torch_collectives import DryCollectives
from shardwise.optim.matrices.ownership import OwnerRank


class _EveryRank(DryCollectives):
    """All ranks of a mesh, replica by replica, with only the collectives that full tensors and norms need."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        rank = mesh.replicate.rank * mesh.shard.world_size + mesh.shard.rank
        super().__init__(rank, mesh.world_size, mesh.device)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Broadcast in the shard group of `src`, then from each of its ranks to the other replicas."""
        replica, rank = divmod(src, self._mesh.shard.world_size)
        if self._mesh.replicate.rank == replica:
            self._mesh.shard.broadcast(tensor, rank)
        self._mesh.replicate.broadcast(tensor, replica)

    def all_reduce(self, tensor: Tensor, op: str = "sum", after: Work = FINISHED, label: int = 0) -> Work:
        """Reduce in the shard groups, then over the replicas."""
        first = self._mesh.shard.all_reduce(tensor, op, after, label)
        return self._mesh.replicate.all_reduce(tensor, op, first, label)


def every_rank(mesh: Mesh) -> Collectives:
    """Return all ranks of a mesh as one group, in which replica r's rank s is r * shards + s. Does not communicate."""
    if mesh.replicate.world_size == 1:
        return mesh.shard
    return mesh.replicate if mesh.shard.world_size == 1 else _EveryRank(mesh)


class OwnedState:
    """Makes and describes the optimizer state of one mesh's matrices."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._ranks = every_rank(mesh)

    def placement(self, fqn: str, shape: tuple[int, ...], owner: OwnerRank) -> Placement:
        """Return a placement with all elements on the owner: the layout's slices are as large as the whole tensor."""
        numel = math.prod(shape)
        position = owner.replica * self._mesh.shard.world_size + owner.rank
        entry = Entry(fqn, tuple(shape), position * numel, numel)
        return Placement(FlatLayout((entry,), numel * self._ranks.world_size, self._ranks.world_size), 0, self._ranks)

    def wrap(self, parameter: ShardedParameter, owner: OwnerRank, value: Any) -> Any:
        """Wrap the owner's value of a state entry: a tensor of more than one element becomes a `ShardedParameter` that
        shares its memory, and anything else stays as it is."""
        if not isinstance(value, Tensor) or value.numel() == 1:
            return value
        return ShardedParameter(
            value.detach().contiguous().view(-1), self.placement(parameter.fqn, tuple(value.shape), owner)
        )

    def describe(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Describe the owner's state for other ranks, in values that JSON can hold. Raises UsageError for others."""
        described: dict[str, Any] = {}
        for name, value in state.items():
            if isinstance(value, ShardedParameter):
                described[name] = {"shape": list(value.shape), "dtype": _name(value.local.dtype)}
            elif isinstance(value, Tensor):
                described[name] = {"number": value.item(), "shape": list(value.shape), "dtype": _name(value.dtype)}
            elif value is None or isinstance(value, (bool, int, float, str)):
                described[name] = {"value": value}
            else:
                raise UsageError(
                    f"optimizer state {name!r} is a {type(value).__name__}; it must be a tensor, a number, a string or "
                    "None"
                )
        return described

    def mirror(self, parameter: ShardedParameter, owner: OwnerRank, described: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a matrix for a rank that does not own it, from the owner's description."""
        device = parameter.local.device
        state: dict[str, Any] = {}
        for name, what in described.items():
            if "value" in what:
                state[name] = what["value"]
            elif "number" in what:
                state[name] = torch.full(what["shape"], what["number"], dtype=_dtype(what), device="cpu")
            else:
                nothing = torch.empty(0, dtype=_dtype(what), device=device)
                state[name] = ShardedParameter(nothing, self.placement(parameter.fqn, tuple(what["shape"]), owner))
        return state

    def exchange(self, changed: Mapping[int, Any]) -> dict[int, Any]:
        """Send this rank's descriptions and return those of all ranks, by matrix number. Every rank must call this."""
        message = json.dumps(changed).encode()
        for group in (self._mesh.shard, self._mesh.replicate):
            if group.world_size > 1:
                message = group.exchange(message, _merge)
        return {int(index): described for index, described in json.loads(message).items()}


def _merge(left: bytes, right: bytes) -> bytes:
    return json.dumps(json.loads(left) | json.loads(right)).encode()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(what: Mapping[str, Any]) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, what["dtype"])
    return dtype

"""Optimizer state of whole matrices: tensors of any shape on the owner, and pieces without elements on other ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
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
    """The ranks of several groups, with only the collectives that full tensors and norms need. The ranks of the first
    group are neighbours, then those of the second."""

    def __init__(self, groups: Sequence[Collectives]) -> None:
        self._groups = groups
        rank = 0
        for group in reversed(groups):
            rank = rank * group.world_size + group.rank
        super().__init__(rank, math.prod(group.world_size for group in groups), groups[0].device)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Broadcast in the first group of `src`, then from each of its ranks in the second one, and so on."""
        rank = self.rank
        for group in self._groups:
            (src, of_group), rank = divmod(src, group.world_size), rank // group.world_size
            if src == rank:
                group.broadcast(tensor, of_group)

    def all_reduce(self, tensor: Tensor, op: str = "sum", after: Work = FINISHED, label: int = 0) -> Work:
        """Reduce in one group after the other."""
        for group in self._groups:
            after = group.all_reduce(tensor, op, after, label)
        return after


def every_rank(groups: Sequence[Collectives]) -> Collectives:
    """Return the ranks of several groups as one, in which those of the first group are neighbours. Does not
    communicate."""
    several = [group for group in groups if group.world_size > 1]
    return _EveryRank(several) if len(several) > 1 else (several or groups)[0]


class OwnedState:
    """Makes and describes the optimizer state of one mesh's matrices."""

    def __init__(self, mesh: Mesh, axis: Collectives | None) -> None:
        """axis: the tensor axis along which some matrices are cut."""
        self._groups = [mesh.shard, mesh.replicate]
        self._ranks = every_rank(self._groups)
        self._shards = mesh.shard.world_size
        self._axis = axis
        self._ranks_of_cut = self._ranks if axis is None else every_rank([axis, *self._groups])

    @property
    def groups(self) -> list[Collectives]:
        """The groups over which matrices and their state move."""
        return [*self._groups, *([] if self._axis is None else [self._axis])]

    def placement(self, fqn: str, shape: tuple[int, ...], owner: OwnerRank) -> Placement:
        """Return a placement with all elements on the owner: the layout's slices are as large as the whole tensor."""
        numel = math.prod(shape)
        position, ranks = owner.replica * self._shards + owner.rank, self._ranks
        if owner.tensor is not None:
            assert self._axis is not None
            position, ranks = position * self._axis.world_size + owner.tensor, self._ranks_of_cut
        entry = Entry(fqn, tuple(shape), position * numel, numel)
        return Placement(FlatLayout((entry,), numel * ranks.world_size, ranks.world_size), 0, ranks)

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
        for group in self.groups:
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

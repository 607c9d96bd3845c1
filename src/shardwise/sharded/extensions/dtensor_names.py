"""What a sharded parameter offers under DTensor's names: `to_local`, `device_mesh` and `placements`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import UsageError
from shardwise.fsdp.collectives import Collectives
from shardwise.fsdp.sharded_parameter import ShardedParameter, add_methods


def attach() -> None:
    """Give sharded parameters these names."""
    add_methods(to_local=_to_local, device_mesh=property(_device_mesh), placements=property(_placements))


@dataclass(frozen=True, slots=True)
class FlatPieces:
    """How a tensor is cut: rank r of the mesh holds the elements `ranges[r]`, [start, stop), of the flattened tensor.

    Not one of DTensor's placements, which cut whole rows: code that looks for those finds none.
    """

    ranges: tuple[tuple[int, int], ...]
    """By rank; many may be empty."""

    def is_shard(self, dim: int | None = None) -> bool:
        """False: the tensor is not cut along a dim."""
        return False

    def is_replicate(self) -> bool:
        """Whether there is one rank."""
        return len(self.ranges) == 1

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """False."""
        return False


def _placements(sharded: ShardedParameter) -> tuple[Any, ...]:
    """How the ranks of `device_mesh` hold it: in consecutive ranges of the flattened tensor, of any length. Of a
    tensor-parallel parameter, of the flattened local tensor; torch's placements on the other axes are beside that."""
    placement = sharded.placement
    ranks = range(placement.shard_group.world_size)
    fragments = [placement.layout.fragment(placement.index, rank) for rank in ranks]
    pieces = FlatPieces(tuple((fragment.start, fragment.stop) for fragment in fragments))
    if placement.part is None:
        return (pieces,)
    from torch.distributed.tensor import Replicate  # half a second, which other models need not spend

    replicas = (Replicate(),) if placement.replicas is not None and placement.replicas.world_size > 1 else ()
    return (*replicas, pieces, *placement.spec.placements)  # type: ignore[attr-defined]


def _device_mesh(sharded: ShardedParameter) -> DeviceMesh:
    """The ranks that hold pieces, as a mesh of one axis; for a tensor-parallel parameter, of its data and tensor axes.
    No communication. Raises UsageError if there is no process group."""
    of_all_axes: DeviceMesh | None = getattr(sharded.placement, "device_mesh", None)
    return of_all_axes if of_all_axes is not None else mesh_of(sharded.placement.shard_group, sharded.fqn)


def _to_local(sharded: ShardedParameter) -> Tensor:
    """`local`, by DTensor's name."""
    return sharded.local


def mesh_of(ranks: Collectives, fqn: str) -> DeviceMesh:
    """Return a mesh of these ranks. No communication. Raises UsageError, which names `fqn`, if there is no process
    group."""
    group = ranks.process_group
    if group is None and dist.is_initialized() and dist.get_world_size() == 1:
        group = dist.group.WORLD
    if group is None or not dist.is_initialized():
        raise UsageError(f"{fqn!r} is on one rank without a process group, so it has no device_mesh")
    return DeviceMesh.from_group(group, ranks.device.type, mesh_dim_names=("shard",))

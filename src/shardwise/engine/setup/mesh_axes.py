"""Meshes with named axes: which of them are data axes, and which are for tensor and context parallelism."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import accelerators
from shardwise.errors import MeshError
from shardwise.fsdp.mesh import Mesh
from shardwise.fsdp.strategy import Strategy
from shardwise.policy.checks import check_count

REPLICATE, SHARD, CONTEXT, TENSOR = "dp_replicate", "dp_shard", "cp", "tp"
NAMES = (REPLICATE, SHARD, CONTEXT, TENSOR)
SAME_EXPERTS, EXPERTS = "efsdp", "ep"
"""Axes that the shard ranks are divided into: ranks with the same experts, and ranks with different ones."""
_EXPERT_RANKS = "_shardwise_expert_ranks"
"""Attribute of a mesh that `mesh` made for expert parallelism: the size of that axis."""


def mesh(dp_replicate: int = 1, dp_shard: int = -1, cp: int = 1, tp: int = 1, ep: int = 1) -> DeviceMesh:
    """Return a mesh of all ranks with the axes `dp_replicate`, `dp_shard`, `cp` and `tp`. Every rank must call this.

    Args:
        dp_replicate: number of copies of the model.
        dp_shard: number of ranks that parameters, gradients and optimizer state are sharded over; -1: all that are
            left.
        cp: number of ranks that share each sequence: each computes its slice, and attention some heads of all tokens.
            Parameters are sharded over these ranks, too.
        tp: number of ranks that share each matrix product, and the same batch. Consecutive ranks: on one host if they
            fit.
        ep: number of shard ranks (`dp_shard` x `cp`) that divide the experts among them, in models of transformers with
            an `ep_plan`: each holds whole experts, and tokens are sent to them. Consecutive ranks. Every rank still has
            a batch of its own.

    Give it to `sw.shard(model, strategy, mesh=mesh, tp_plan="auto")`. Ranks of one `cp` and `tp` group need the same
    batches: `mesh["dp_shard"].get_local_rank()` tells a rank its own. With `cp`, a rank's slice of that is
    `sw.sequence_slice(batch, mesh)`.

    Raises MeshError if the sizes do not make up the number of ranks, `ep` does not divide the shard ranks or is given
    together with `tp`, or there is no process group.
    """
    if not dist.is_initialized():
        raise MeshError("sw.mesh needs a process group: call torch.distributed.init_process_group(...) first")
    for name, size in ((REPLICATE, dp_replicate), (CONTEXT, cp), (TENSOR, tp), (EXPERTS, ep)):
        check_count(name, size, 1)
    world_size, others = dist.get_world_size(), dp_replicate * cp * tp
    if dp_shard == -1 and world_size % others == 0:
        dp_shard = world_size // others
    sizes = (dp_replicate, dp_shard, cp, tp)
    if dp_shard < 1 or math.prod(sizes) != world_size:
        asked = ", ".join(f"{name}={size}" for name, size in zip(NAMES, sizes, strict=True))
        raise MeshError(f"sw.mesh({asked}): the product must be the number of ranks, {world_size}")
    if ep > 1 and tp > 1:
        raise MeshError(
            f"sw.mesh(tp={tp}, ep={ep}): experts over ranks beside a tensor axis are not supported: use one"
        )
    if dp_shard * cp % ep:
        raise MeshError(f"sw.mesh(ep={ep}) does not divide the {dp_shard * cp} ranks of dp_shard x cp")
    made = init_device_mesh(accelerators.of_group(dist.group.WORLD).type, sizes, mesh_dim_names=NAMES)
    if ep > 1:
        setattr(made, _EXPERT_RANKS, ep)
    return made


@dataclass(frozen=True, eq=False)
class DividedMesh(Mesh):
    """Data axes of a model whose experts a plan has divided already."""

    same_experts: Mesh = field(kw_only=True)
    """Those of the ranks that hold the same experts."""


@dataclass(frozen=True)
class Axes:
    """A mesh's axes, by what they are for."""

    data: DeviceMesh
    """What `sw.shard` shards and replicates over: one axis, or two for hybrid strategies."""
    tensor: DeviceMesh | None
    """The tensor axis, if there is one."""
    context: DeviceMesh | None
    """The context axis, if it has more than one rank. It is part of `data`."""
    experts: DeviceMesh | None = None
    """`data` with its shard ranks divided into those that hold the same experts and, as the last axis, those that hold
    different ones. None: all hold all experts."""

    @classmethod
    def of(cls, mesh: DeviceMesh, strategy: Strategy) -> Axes:
        """Divide a mesh by the names of its axes. A mesh without an axis "dp_shard" has data axes only.

        Raises MeshError if the strategy does not fit the sizes.
        """
        names = mesh.mesh_dim_names or ()
        if SHARD not in names:
            return cls(mesh, None, None)
        tensor = mesh[TENSOR] if TENSOR in names else None
        context = mesh[CONTEXT] if CONTEXT in names and mesh[CONTEXT].size() > 1 else None
        shards = mesh[SHARD] if context is None else mesh[SHARD, CONTEXT]._flatten(f"{SHARD}_{CONTEXT}")
        root, experts = mesh._get_root_mesh(), None
        size = getattr(root, _EXPERT_RANKS, 1)
        if size > 1:
            if mesh is not root:
                raise MeshError(f"pass the whole mesh of sw.mesh(ep={size}), of which {names} is a part")
            experts = shards._unflatten(0, (shards.size() // size, size), (SAME_EXPERTS, EXPERTS))
        if REPLICATE not in names:
            return cls(shards, tensor, context, experts)
        if strategy.sharded and strategy.replicated:
            both = mesh[REPLICATE, SHARD] if context is None else DeviceMesh._concatenate([mesh[REPLICATE], shards])
            if experts is not None:
                experts = DeviceMesh._concatenate([mesh[REPLICATE], experts])
            return cls(both, tensor, context, experts)
        if mesh[REPLICATE].size() == 1:
            return cls(shards, tensor, context, experts)
        if shards.size() == 1 and not strategy.sharded:
            return cls(mesh[REPLICATE], tensor, context)
        raise MeshError(
            f"strategy {strategy.value!r} on a mesh with {REPLICATE}={mesh[REPLICATE].size()} and "
            f"{SHARD}={mesh[SHARD].size()}: use hybrid_shard or hybrid_shard_zero2, or one of the two axes alone"
        )

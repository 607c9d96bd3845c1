"""What to do instead of an operation that is not possible on pieces, in the errors that refuse it."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from shardwise.fsdp.sharded_parameter import LOOK, ShardedParameter, advise


def attach() -> None:
    """Name the way out in refusals."""
    advise(_way_out)


def _way_out(func: OpOverload, sharded: ShardedParameter, args: tuple[Any, ...]) -> str:
    name = func._schema.name
    if name == "aten::view" and tuple(args[1]) == sharded.shape:  # how torch finds where a gradient arrives
        sharded.refuse(name.replace("::", "."), _GRADIENT_EDGE)
    random = torch.Tag.nondeterministic_seeded in func.tags
    return _RANDOM if random else _WAYS_OUT.get(name, _ANYTHING_ELSE)


_ANYTHING_ELSE = (
    "each rank holds only a 1-D piece, and this operation is neither elementwise nor a whole-tensor reduction. To "
    "compute outside the model's forward, call sw.register_forward_method(module, name) for a method, or "
    "sw.unshard(module) (collective) before a loss. Otherwise use sw.unsharded(model), .full_tensor() (collective), "
    "or .local for this rank's piece. Apply parametrizations (spectral_norm, ...) and pruning before sw.shard, and "
    "build optimizers of whole matrices (Muon, ...) with sw.optim.whole_matrix"
)
_INNER = "The inner product of two gradients of one parameter is (a * b).sum(), which is global"
_GRADIENT_EDGE = (
    "its gradient goes to the leaf that its unit computes with instead, so a hook of "
    "torch.autograd.graph.register_multi_grad_hook would never run: use the parameters' own register_hook (this "
    "rank's gradient) or register_post_accumulate_grad_hook (the mean over ranks). Pipeline schedules that compute "
    "gradients of weights apart (zero bubble) would leave it out: use Schedule1F1B or ScheduleInterleaved1F1B"
)
_WAYS_OUT: dict[str, str] = {
    "aten::_local_scalar_dense": LOOK,
    "aten::_foreach_powsum": "use torch._foreach_norm",
    "aten::permute": f"{_INNER}. {_ANYTHING_ELSE}",
    "aten::view": "each rank holds only a 1-D piece, which has no other shape. Apply weight_norm, pruning and other "
    "parametrizations before sw.shard, and call parameters_to_vector and the like in sw.unsharded(model). To "
    "compute a loss outside the model's forward, call sw.unshard(module) first (collective). "
    f"DistributedDataParallel around a sharded model is not needed: backward reduces gradients. {_INNER}",
}
_RANDOM = "each rank would draw its own numbers: initialise before sw.shard, or in sw.unsharded(model, writeback=True)"

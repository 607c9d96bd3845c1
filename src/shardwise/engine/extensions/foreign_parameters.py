"""What became of a parameter that its module does not hold any more, in words."""

from __future__ import annotations

import torch

from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter


def explain(fqn: str, held: object) -> UsageError:
    """Return the error for a module that holds another tensor than the parameter that sharding put there."""
    if torch.compiler.is_exporting():
        return UsageError(
            f"torch.export of a sharded model, whose {fqn!r} is not there as a whole: export it, also by "
            "torch.onnx.export or torch.jit.trace, inside sw.unsharded(model)"
        )
    if held is None:
        return UsageError(
            f"parameter {fqn!r} was removed from its module after sw.shard, as pruning, weight_norm and other "
            "parametrizations do: apply them before sw.shard"
        )
    if isinstance(held, ShardedParameter):
        why = "another sharded tensor, as torch.func.functional_call does: a unit can compute only with its own shard"
    else:
        why = f"a {type(held).__name__} after sw.shard"
    return UsageError(
        f"parameter {fqn!r} was replaced by {why}; change weights in place inside sw.unsharded(model, writeback=True), "
        "where functional_call works on full tensors, or replace modules before sharding"
    )

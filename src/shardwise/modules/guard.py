"""Methods of sharded modules that torch's own would get wrong: conversions, and `zero_grad`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardwise.errors import UsageError
from shardwise.sharded.parameter import ShardedParameter
from shardwise.sharded.waiting import drop_waiting


def guard(module: nn.Module) -> None:
    """Have `.to()`, `.half()` and the like raise where they would move or cast sharded parameters of the module or
    below, and `zero_grad()` drop gradients that still wait to be reduced."""

    def apply(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        kinds = {(p.dtype, p.device) for p in module.parameters() if isinstance(p, ShardedParameter)}
        for dtype, device in kinds:
            result = fn(torch.empty(0, dtype=dtype, device=device))
            if (result.dtype, result.device) != (dtype, device):
                raise UsageError(
                    f"a sharded model cannot be converted from {dtype} on {device} to {result.dtype} on "
                    f"{result.device}: convert it before sw.shard, or pass sw.shard(precision=sw.Precision(...))"
                )
        return module

    def zero_grad(set_to_none: bool = True) -> None:
        type(module).zero_grad(module, set_to_none)
        drop_waiting(module.parameters())

    module.__dict__.update(_apply=apply, zero_grad=zero_grad)

"""Methods of modules that torch's own would get wrong: conversions of sharded ones, and `zero_grad` of any, since a
sharded one may lie below. Torch has no hooks around that, so the method of its modules is wrapped."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor, nn

from shardwise.errors import UsageError
from shardwise.sharded.parameter import ShardedParameter
from shardwise.sharded.waiting import drop_waiting


def guard(module: nn.Module) -> None:
    """Have `.to()`, `.half()` and the like raise where they would move or cast sharded parameters of the module or
    below."""

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

    module.__dict__.update(_apply=apply)


_zero_grad = nn.Module.zero_grad


@wraps(_zero_grad)
@torch._disable_dynamo  # type: ignore[attr-defined]
def _zero_and_drop(module: nn.Module, set_to_none: bool = True) -> None:
    _zero_grad(module, set_to_none)
    drop_waiting(module.parameters())


nn.Module.zero_grad = _zero_and_drop  # type: ignore[assignment, method-assign]

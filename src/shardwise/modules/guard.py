"""Methods of modules that torch's own would get wrong: conversions of sharded ones, and `zero_grad` of any, since a
sharded one may lie below. Torch has no hooks around that, so the method of its modules is wrapped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

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


def guard_loading(model: nn.Module) -> None:
    """Have `load_state_dict(assign=True)` raise, of the model and of every module in it that holds a sharded
    parameter."""
    for module in model.modules():
        holds = any(isinstance(parameter, ShardedParameter) for parameter in module._parameters.values())
        if (module is model or holds) and not module.__dict__.get(_LOADING_GUARDED):
            module.__dict__[_LOADING_GUARDED] = True
            module.register_load_state_dict_pre_hook(_refuse_to_assign)


_LOADING_GUARDED = "_shardwise_loading_guarded"


def _refuse_to_assign(module: nn.Module, state: Any, prefix: str, metadata: Mapping[str, Any], *_: Any) -> None:
    if metadata.get("assign_to_params_buffers"):
        where = repr(prefix.removesuffix(".")) if prefix else f"this {type(module).__name__}"
        raise UsageError(
            f"load_state_dict(assign=True) would put other tensors in the place of the shards of {where}: leave assign "
            "out, and each rank's pieces are written (and cast) in place"
        )


_zero_grad = nn.Module.zero_grad


@wraps(_zero_grad)
@torch._disable_dynamo  # type: ignore[attr-defined]
def _zero_and_drop(module: nn.Module, set_to_none: bool = True) -> None:
    _zero_grad(module, set_to_none)
    drop_waiting(module.parameters())


nn.Module.zero_grad = _zero_and_drop  # type: ignore[assignment, method-assign]

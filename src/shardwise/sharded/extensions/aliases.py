"""`parameter.data = tensor`, and what becomes of those who hold `.data` or `detach()` of the parameter."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter, add_methods

_without_autograd = ShardedParameter.without_autograd
_ALIASES = "_shardwise_aliases"
"""Attribute of a parameter: weak references to its aliases."""


def attach() -> None:
    """Let sharded parameters keep track of their aliases, and take new numbers."""
    add_methods(data=property(ShardedParameter.detach, _copy), without_autograd=_tracked, keep_copy=_keep_copy)


def _tracked(parameter: ShardedParameter) -> ShardedParameter:
    """See `ShardedParameter.without_autograd`."""
    alias = _without_autograd(parameter)
    origin = alias._origin
    assert origin is not None
    alive = [held for held in origin.__dict__.get(_ALIASES, ()) if held() is not None]
    origin.__dict__[_ALIASES] = [*alive, weakref.ref(alias)]
    return alias


def _keep_copy(alias: ShardedParameter) -> None:
    """Stop being an alias: keep a copy of what is in the memory now."""
    alias.local, alias._origin = alias.local.clone(), None


def _copy(parameter: ShardedParameter, value: Tensor) -> None:
    """Copy `value`: the piece stays where the engine put it. Other dtypes, devices and cuts are refused.

    Torch would take the memory of `value` and leave the old memory to tensors that `.data` or `detach()` returned
    before; here those get a copy of what was in it.
    """
    if value is parameter:
        return
    if value.dtype != parameter.stored_dtype or value.device != parameter.stored_device:
        raise UsageError(
            f"cannot convert {parameter.fqn!r} from {parameter.stored_dtype} on {parameter.stored_device} to "
            f"{value.dtype} on {value.device}: its memory belongs to its unit. Convert the model before sw.shard, or "
            "pass sw.shard(precision=...)"
        )
    with torch.no_grad():
        for held in parameter.__dict__.pop(_ALIASES, ()):
            alias = held()
            if alias is not None:
                alias.keep_copy()
        parameter.copy_(value)

"""The step pre-hook, always the last one, through which an unchanged optimizer steps with offloaded tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from shardwise.errors import UsageError
from shardwise.offload.step import step_with_stores
from shardwise.sharded.extensions.partial_step import empty_view

_HANDLE = "_shardwise_offload_hook"


def put_last(optimizer: Optimizer, has_stores: bool) -> None:
    """Before a step, move our pre-hook behind all others, or remove it if nothing of the optimizer rests elsewhere.

    Args:
        optimizer: about to step.
        has_stores: whether its state, parameters or gradients rest on a tier.

    Raises:
        UsageError: the optimizer places its state itself, as whole-matrix optimizers do.
    """
    if has_stores and hasattr(optimizer, "state_placement") and not hasattr(optimizer, "first_state"):
        raise UsageError(
            f"offload cannot be used with {type(optimizer).__name__}, which keeps the state of whole matrices on their "
            "owners: leave one of the two out"
        )
    handle = optimizer.__dict__.pop(_HANDLE, None)
    if handle is not None:
        handle.remove()
    if has_stores:
        optimizer.__dict__[_HANDLE] = optimizer.register_step_pre_hook(_take)


def _take(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Take the step, after the closure if there is one, and let torch's own call step a view without parameters."""
    if args[0] is not optimizer:  # the step was taken in backward
        return args, kwargs
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        _step(optimizer)
        return (empty_view(optimizer), *args[1:]), kwargs

    def with_step() -> Any:
        result = closure()
        _step(optimizer)
        return result

    if "closure" in kwargs:
        return (empty_view(optimizer), *args[1:]), {**kwargs, "closure": with_step}
    return (empty_view(optimizer), with_step, *args[2:]), kwargs


@torch.no_grad()
def _step(optimizer: Optimizer) -> None:
    step_with_stores(optimizer, [group["params"] for group in optimizer.param_groups])

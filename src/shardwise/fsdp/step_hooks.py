"""Around an optimizer's step: the hooks that notify the units whose shards it updates.

A step must not run while gradients wait to be reduced, and a fused optimizer does not increase a tensor's version.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from functools import cache, partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise.fsdp.sharded_parameter import Owner, types_of_lists
from shardwise.registry import registered

Attached = Callable[[Optimizer, Collection[Owner]], object]
BEFORE = "before an optimizer's step"
"""Seam: called with an optimizer and the units that it updates, before each step. May raise."""
AFTER = "after an optimizer's step"
"""Seam: the same after each step."""
IS_PART = "_shardwise_view"
"""Attribute of an optimizer whose steps are parts of another one's: nothing is called around them."""

_before: list[Attached] = []
_after: list[Attached] = []
_stepping: weakref.WeakKeyDictionary[Optimizer, set[Owner]] = weakref.WeakKeyDictionary()
"""The owners that each optimizer updates whose step is under way, or raised."""


@cache
def watch() -> None:
    """Hook the steps of every optimizer, once in a process."""
    _before[:], _after[:] = registered(BEFORE), registered(AFTER)
    register_optimizer_step_pre_hook(_pre_step)
    register_optimizer_step_post_hook(_post_step)


def attach_before(attached: Attached) -> None:
    """Have `attached` called before each step from now on, after all others. A second call does nothing."""
    if attached not in _before:
        _before.append(attached)


def updates_nothing(optimizer: Optimizer) -> None:
    """Note that the optimizer's `step()` under way updates nothing, because all updates have been made already."""
    _stepping[optimizer] = set()


def _owners(optimizer: Optimizer) -> set[Owner]:
    return {
        parameter.unit
        for group in optimizer.param_groups
        for parameter in group["params"]
        if type(parameter) in types_of_lists and parameter.unit is not None
    }


@torch._disable_dynamo  # type: ignore[attr-defined]
def _pre_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Check that no gradients wait to be reduced. A closure may still reduce some: if the step is given one, that check
    runs after it, and the step's new arguments are returned."""
    if IS_PART in optimizer.__dict__:  # inside the step of a subclass, which calls its base's
        return None
    owners = _owners(optimizer)
    for attached in _before:
        attached(optimizer, owners)
    _stepping[optimizer] = owners
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if owners and closure is not None:
        checked = partial(_evaluate, closure, owners)
        return (
            (args, {**kwargs, "closure": checked}) if "closure" in kwargs else ((args[0], checked, *args[2:]), kwargs)
        )
    for unit in owners:
        unit.about_to_step()
    return None


def _evaluate(closure: Callable[[], Any], owners: set[Owner]) -> Any:
    """Run the closure of a step, which calls backward, and then check that no gradients wait to be reduced."""
    result = closure()
    for unit in owners:
        unit.about_to_step()
    return result


def _post_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if IS_PART in optimizer.__dict__:
        return
    owners = _stepping.pop(optimizer, None)
    if owners is None:  # a step inside a step of the same optimizer (a subclass's) is over already
        owners = _owners(optimizer)
    for unit in owners:
        unit.end_step()
    for attached in _after:
        attached(optimizer, owners)

"""What happens around every optimizer step, every `zero_grad` and every backward, whichever optimizer it is.

Before: parameters that the optimizer was given before `sw.shard` are exchanged for their sharded faces, and gradients
that still wait to be reduced are an error. After: units whose weights were written get a newer version, since fused
optimizers bump no tensor's version counter. `zero_grad` drops gradients that `sw.no_sync` left waiting as well as those
in `.grad`, and the `inputs` of a backward are leaves; torch has no hooks around either, so both are wrapped: of
backward what torch's own functions call, so that whoever imported those before is served too. So is an optimizer's
`load_state_dict`, which also takes the state of an unsharded model.
"""

from __future__ import annotations

import sys
import weakref
from contextlib import suppress
from functools import cache, wraps
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise.errors import UsageError
from shardwise.sharded.inputs import with_leaves
from shardwise.sharded.optimizer_state import cut_state
from shardwise.sharded.parameter import SHARDED_FACE as SHARDED_FACE
from shardwise.sharded.parameter import Owner, ShardedParameter, outer_face
from shardwise.sharded.waiting import drop_waiting

stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Every optimizer that has updated a sharded parameter."""


def _exchange(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        parameters = group["params"]
        for position, parameter in enumerate(parameters):
            if type(parameter) is ShardedParameter:
                continue
            sharded = outer_face(parameter)
            if sharded is None:
                continue
            if optimizer.state.get(parameter):
                raise UsageError(
                    f"this {type(optimizer).__name__} took steps on {sharded.fqn!r} before sw.shard, so its state is "
                    "unsharded; build the optimizer after sw.shard"
                )
            optimizer.state.pop(parameter, None)
            parameters[position] = sharded


def _owners(optimizer: Optimizer) -> set[Owner]:
    return {
        parameter.unit
        for group in optimizer.param_groups
        for parameter in group["params"]
        if type(parameter) is ShardedParameter and parameter.unit is not None
    }


@torch._disable_dynamo  # type: ignore[attr-defined]
def _pre_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _exchange(optimizer)
    owners = _owners(optimizer)
    for unit in owners:
        unit.about_to_step()
    if owners and "torch._dynamo" in sys.modules:
        _leave_dispatch_uncompiled()


@cache
def _leave_dispatch_uncompiled() -> None:
    """Under torch.compile(optimizer.step) Dynamo cannot trace sharded parameters, and would compile our code that takes
    their operations apart instead, once for each operation: a minute of work that makes nothing faster."""
    with suppress(AttributeError):  # of torch's own, and only about time
        torch._dynamo.trace_rules.add("shardwise.sharded")


def _post_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    owners = _owners(optimizer)
    for unit in owners:
        unit.stepped()
    if owners:
        stepped.add(optimizer)


_zero_grad = Optimizer.zero_grad


@wraps(_zero_grad)
@torch._disable_dynamo  # type: ignore[attr-defined]
def _zero_and_drop(optimizer: Optimizer, set_to_none: bool = True) -> None:
    _exchange(optimizer)
    _zero_grad(optimizer, set_to_none)
    drop_waiting(parameter for group in optimizer.param_groups for parameter in group["params"])


_load_state_dict = Optimizer.load_state_dict


@wraps(_load_state_dict)
@torch._disable_dynamo  # type: ignore[attr-defined]
def _load_and_cut(optimizer: Optimizer, state_dict: Any) -> None:
    _exchange(optimizer)
    before = {name: optimizer.__dict__[name] for name in ("state", "param_groups")}
    _load_state_dict(optimizer, state_dict)
    try:
        for parameter, state in optimizer.state.items():
            if type(parameter) is ShardedParameter:
                state.update(cut_state(parameter, state))
    except UsageError:
        optimizer.__dict__.update(before)
        raise


torch.autograd._engine_run_backward = with_leaves(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]
Optimizer.zero_grad = _zero_and_drop  # type: ignore[assignment, method-assign]
Optimizer.load_state_dict = _load_and_cut  # type: ignore[assignment, method-assign]
register_optimizer_step_pre_hook(_pre_step)
register_optimizer_step_post_hook(_post_step)

"""The step of some of an optimizer's parameters: what optimizers in backward and state on disk are made of.

An elementwise optimizer keeps everything that it knows by parameter, counters included, so its step over all parameters
is the same as its steps over some of them, one after another. docs/design/offload.md has the alternatives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardwise.errors import UsageError
from shardwise.sharded.parameter import Owner, ShardedParameter

Selected = list[list[Tensor]]
"""By group of an optimizer, some of its parameters."""

_IS_VIEW = "_shardwise_view"


def is_view(optimizer: Optimizer) -> bool:
    """Whether it stands for an optimizer in a step of some of its parameters."""
    return _IS_VIEW in optimizer.__dict__


def view_of(
    optimizer: Optimizer, selected: Sequence[Sequence[Tensor]], state: MutableMapping[Any, Any] | None = None
) -> Optimizer:
    """An optimizer of the same class and attributes with some of the parameters and no hooks on its step.

    Args:
        selected: by group, its parameters; groups keep their place.
        state: in the place of the optimizer's own.
    """
    view: Optimizer = object.__new__(type(optimizer))
    view.__dict__.update(
        optimizer.__dict__,
        param_groups=[
            {**group, "params": list(some)} for group, some in zip(optimizer.param_groups, selected, strict=True)
        ],
        state=optimizer.state if state is None else state,
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
        **{_IS_VIEW: True},
    )
    return view


def hollow(optimizer: Optimizer) -> Optimizer:
    """A view without parameters, whose step does nothing."""
    return view_of(optimizer, [()] * len(optimizer.param_groups))


def step_some(
    optimizer: Optimizer, selected: Sequence[Sequence[Tensor]], state: MutableMapping[Any, Any] | None = None
) -> None:
    """Take the optimizer's step for some of its parameters. No communication; no hooks on the step run.

    Raises UsageError, after the step, for an optimizer that counts in its groups.
    """
    view = view_of(optimizer, selected, state)
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(view)  # torch wraps a class's step to run hooks
    for number, (own, narrowed) in enumerate(zip(optimizer.param_groups, view.param_groups, strict=True)):
        changed = [key for key in narrowed if key != "params" and narrowed[key] is not own.get(key)]
        if changed:
            raise UsageError(
                f"{type(optimizer).__name__} wrote {changed[0]!r} of its group {number} in its step: it keeps numbers "
                "by group, not by parameter, so that its step cannot be taken unit by unit. Use an optimizer of "
                "torch's, without optimizer_in_backward and offload"
            )


def by_owner(optimizer: Optimizer) -> Mapping[Owner | None, Selected]:
    """Its parameters by the unit that they belong to (None: plain ones), and by group; in the optimizer's order."""
    found: dict[Owner | None, Selected] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            owner = parameter.unit if type(parameter) is ShardedParameter else None
            if owner not in found:
                found[owner] = [[] for _ in optimizer.param_groups]
            found[owner][number].append(parameter)
    return found

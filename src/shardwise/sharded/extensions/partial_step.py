"""An optimizer's step for some of its parameters, on which steps in backward and offloaded state are built.

An elementwise optimizer keeps all of its state by parameter, counters included, so its step over all parameters is the
same as its steps over some of them, one after another. docs/design/offload.md has the alternatives.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardwise.errors import UsageError
from shardwise.fsdp.operations import IS_PART
from shardwise.fsdp.sharded_parameter import Owner, ShardedParameter
from shardwise.sharded.extensions.offloaded import slice_of

Selected = list[list[Tensor]]
"""Some of an optimizer's parameters, by group."""

_NAMES = "param_names"
_OF_VIEWS = frozenset({IS_PART, "param_groups", "state", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"})
"""Attributes of a view that differ from the optimizer's."""


def view_of(
    optimizer: Optimizer,
    selected: Sequence[Sequence[Tensor]],
    state: MutableMapping[Any, Any] | None = None,
    replacements: Mapping[Tensor, Tensor] | None = None,
) -> Optimizer:
    """Return an optimizer of the same class and attributes with some of the parameters and no hooks on its step.

    Args:
        selected: the view's parameters, by group; groups keep their position.
        state: the view's state, by the parameters that it steps; default: the optimizer's own.
        replacements: the tensors that the view steps in place of the selected ones; default: those themselves.
    """
    own = {} if replacements is None else replacements
    view: Optimizer = object.__new__(type(optimizer))
    view.__dict__.update(
        optimizer.__dict__,
        param_groups=[
            _narrowed(group, some, own) for group, some in zip(optimizer.param_groups, selected, strict=True)
        ],
        state=optimizer.state if state is None else state,
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
        **{IS_PART: True},
    )
    return view


def _narrowed(group: dict[str, Any], some: Sequence[Tensor], replacements: Mapping[Tensor, Tensor]) -> dict[str, Any]:
    narrowed = {**group, "params": [replacements.get(parameter, parameter) for parameter in some]}
    if _NAMES in group:
        names = {id(p): name for p, name in zip(group["params"], group[_NAMES], strict=True)}
        narrowed[_NAMES] = [names.get(id(parameter), "") for parameter in some]
    return narrowed


def empty_view(optimizer: Optimizer) -> Optimizer:
    """Return a view without parameters, whose step does nothing."""
    return view_of(optimizer, [()] * len(optimizer.param_groups))


def step_some(
    optimizer: Optimizer, selected: Sequence[Sequence[Tensor]], state: MutableMapping[Any, Any] | None = None
) -> None:
    """Take the optimizer's step for some of its parameters, as `step_view` does."""
    step_view(optimizer, view_of(optimizer, selected, state))
    for parameter in itertools.chain(*selected):
        own = slice_of(parameter)
        if own is not None and parameter.grad is not None:
            own.note_write()


def step_view(optimizer: Optimizer, view: Optimizer) -> None:
    """Take the step of a view of the optimizer. No communication; no hooks on the step run.

    Raises UsageError, after the step, for an optimizer that keeps counters or other state anywhere but by parameter.
    """
    options, attributes = [dict(group) for group in view.param_groups], dict(view.__dict__)
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(view)  # torch wraps a class's step to run hooks
    for what in _kept_elsewhere(view, options, attributes):
        raise UsageError(
            f"{type(optimizer).__name__} keeps {what}, not by parameter, so its step cannot be taken unit by unit: use "
            "an optimizer of torch's, or leave optimizer_in_backward and offload out"
        )


def _kept_elsewhere(
    view: Optimizer, options: Sequence[Mapping[str, Any]], attributes: Mapping[str, Any]
) -> Iterator[str]:
    """Yield what a step of the view has written to the view's groups, which had these options, to its attributes, which
    were these, or to state of no parameter."""
    for number, (own, narrowed) in enumerate(zip(options, view.param_groups, strict=True)):
        for option in narrowed:
            if option not in {"params", _NAMES} and narrowed[option] is not own.get(option):
                yield f"{option!r} in its group {number}"
    for name, value in view.__dict__.items():
        # A switch that a first step turns off, as torch's fused optimizers have, counts nothing.
        if name not in _OF_VIEWS and not isinstance(value, bool) and value is not attributes.get(name):
            yield f"{name!r} as an attribute"
    state: Mapping[Any, Any] = view.state
    for key in state:
        if not isinstance(key, Tensor):
            yield f"{key!r} in its state"


def by_owner(optimizer: Optimizer) -> Mapping[Owner | None, Selected]:
    """Return the optimizer's parameters by the unit that they belong to (None: plain ones) and by group, in the
    optimizer's order."""
    found: dict[Owner | None, Selected] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            owner = parameter.unit if isinstance(parameter, ShardedParameter) else None
            if owner not in found:
                found[owner] = [[] for _ in optimizer.param_groups]
            found[owner][number].append(parameter)
    return found

"""What `sw.shard` changes in torch besides hooks around optimizers' steps, with the reason for each change.

Importing shardwise changes nothing; `sw.shard` calls `install` first. Whatever is changed does what it did before for
tensors that are not sharded. docs/design/torch-patches.md explains why nothing less is enough.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as _clip_types

from shardwise.engine.extensions.failed_backwards import tell_of_errors
from shardwise.engine.extensions.uncompiled import leave_uncompiled
from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import Owner, ShardedParameter, sharded_of, types_of_lists
from shardwise.sharded.extensions.optimizer_state import cut_state

with_state: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Every optimizer that has updated a sharded parameter, or whose state was loaded for some."""

RunBackward = Callable[..., Any]


@cache
def install() -> None:
    """Make the changes to torch that `sw.shard` needs, once in a process."""
    # Torch finds no path from a loss to a sharded parameter, and does not say so: backward(inputs=) would leave every
    # gradient out, and grad() would return None.
    torch.autograd._engine_run_backward = _with_leaves(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]

    # Torch would keep the full state of an unsharded model for every parameter of this rank.
    Optimizer.load_state_dict = _with_cut_state(Optimizer.load_state_dict)  # type: ignore[method-assign]

    # Otherwise optimizers and clipping work on one parameter at a time, and clipping issues a collective for each.
    for supported in (_clip_types, _optimizer_types):
        supported.extend(types_of_lists)


def give_sharded_parameters(optimizer: Optimizer) -> None:
    """Give an optimizer that was built before `sw.shard` the sharded parameters, for libraries that build it first. No
    communication.

    Raises UsageError, and changes nothing, if it has taken steps on them, or has state on the meta device. State from
    before its first step, such as Adagrad's, is cut.
    """
    held = list(_unsharded(optimizer))
    if not held:
        return
    for _, _, parameter, sharded in held:
        state = optimizer.state.get(parameter) or {}
        if any(isinstance(value, Tensor) and value.is_meta for value in state.values()):
            reason = "was built on the meta device, where it keeps state without values"
        elif state and state.get("step") != 0:
            reason = "has taken steps, so its state is unsharded"
        else:
            continue
        raise UsageError(
            f"this {type(optimizer).__name__} of {sharded.fqn!r} {reason}: build the optimizer after sw.shard, from "
            "model.parameters()"
        )
    before = optimizer.state_dict()
    for group, position, parameter, sharded in held:
        group["params"][position] = sharded
        optimizer.state.pop(parameter, None)
    if before["state"]:
        optimizer.load_state_dict(before)


def _unsharded(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], int, Tensor, ShardedParameter]]:
    """Yield each parameter of the optimizer that has been sharded since it was built: group, position, parameter, and
    the sharded one."""
    for group in optimizer.param_groups:
        for position, parameter in enumerate(group["params"]):
            sharded = None if isinstance(parameter, ShardedParameter) else sharded_of(parameter)
            if sharded is not None:
                yield group, position, parameter, sharded


def _check_sharded(optimizer: Optimizer) -> None:
    """Raise UsageError if the optimizer holds parameters as they were before `sw.shard`: its `zero_grad` would miss
    their gradients."""
    for _, _, _, sharded in _unsharded(optimizer):
        raise UsageError(
            f"this {type(optimizer).__name__} holds {sharded.fqn!r} as it was before sw.shard: build the optimizer "
            "after sw.shard, from model.parameters()"
        )


_NOT_ELEMENTWISE = {
    "Adafactor": "computes with whole matrices: build it with sw.optim.whole_matrix(torch.optim.Adafactor, model, ...)",
    "Muon": "computes with whole matrices: build it with sw.optim.whole_matrix(torch.optim.Muon, model, ...)",
    "LBFGS": "computes with all parameters as one vector, and has no sharded form: use an elementwise one, as AdamW",
}
"""Torch's own optimizers that cannot step on pieces."""


def _check_elementwise(optimizer: Optimizer) -> None:
    reason = _NOT_ELEMENTWISE.get(type(optimizer).__name__)
    if reason is not None and type(optimizer).__module__.startswith("torch.optim"):
        raise UsageError(f"torch.optim.{type(optimizer).__name__} of sharded parameters {reason}")


def before_step(optimizer: Optimizer, owners: Collection[Owner]) -> None:
    """Check an optimizer that is about to update these units."""
    _check_sharded(optimizer)
    if owners:
        leave_uncompiled()
        _check_elementwise(optimizer)


def after_step(optimizer: Optimizer, owners: Collection[Owner]) -> None:
    """Note that the optimizer has state of these units."""
    if owners:
        with_state.add(optimizer)


# Full state for a sharded optimizer -----------------------------------------------------------------------------------


def _with_cut_state(load_state_dict: Callable[..., None]) -> Callable[..., None]:
    """Make an `Optimizer.load_state_dict` that also takes the state of an unsharded model and keeps this rank's pieces.
    Every rank must give it equal numbers. It raises UsageError, and changes nothing, for state of another model."""

    @wraps(load_state_dict)
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def load(optimizer: Optimizer, state_dict: Any) -> None:
        _check_sharded(optimizer)
        before = {name: optimizer.__dict__[name] for name in ("state", "param_groups")}
        load_state_dict(optimizer, state_dict)
        try:
            for parameter, state in optimizer.state.items():
                if isinstance(parameter, ShardedParameter) and type(parameter) in types_of_lists:
                    state.update(cut_state(parameter, state))
        except UsageError:
            optimizer.__dict__.update(before)
            raise

    return load


# The inputs of a backward ---------------------------------------------------------------------------------------------


def _with_leaves(run_backward: RunBackward) -> RunBackward:
    """Wrap the function that `torch.autograd.backward` and `torch.autograd.grad` both call, however they were imported.
    Engines whose backward raises in it tell their peers the error.
    A sharded parameter among the inputs of `backward` then stands for the leaf that modules computed with. `grad`
    raises UsageError for one: it would return this rank's gradients, unreduced."""

    @wraps(run_backward)
    def run(
        outputs: Any,
        grads: Any,
        retain_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any] = (),
        *args: Any,
        accumulate_grad: bool = False,
        **kwargs: Any,
    ) -> Any:
        of_inputs = _leaves if accumulate_grad else _no_parameter
        leaves = tuple(leaf for item in inputs for leaf in of_inputs(item))
        with tell_of_errors():
            return run_backward(
                outputs, grads, retain_graph, create_graph, leaves, *args, accumulate_grad=accumulate_grad, **kwargs
            )

    return run


def _leaves(item: Any) -> tuple[Any, ...]:
    """Return where gradients of a sharded parameter arrive: at the leaf that modules computed with, and at itself if
    it was read outside its module's forward. Anything else is returned as it is."""
    leaf: Tensor | None = item.unsharded if type(item) in types_of_lists else None
    return (item,) if leaf is None else (leaf, item)


def _no_parameter(item: Any) -> tuple[Any, ...]:
    """Return the item. Raises UsageError if it is a sharded parameter, or stands for one."""
    if not isinstance(item, Tensor):
        return (item,)
    sharded = item if isinstance(item, ShardedParameter) else sharded_of(item)
    if sharded is not None and sharded.unsharded is not None:
        raise UsageError(
            f"torch.autograd.grad over the sharded parameter {sharded.fqn!r}: its gradient would be this rank's alone, "
            "not the mean over ranks. Call loss.backward(inputs=[...]) with the parameters and read their .grad, or "
            "work in sw.unsharded(model)"
        )
    return (item,)

"""A unit's place in the module tree and its parameters' places, and a parameter's attributes other than its values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shardwise.errors import UsageError
from shardwise.sharded.parameter import ShardedParameter

Values = Callable[[str], Tensor | None]
"""Returns the full tensor of the parameter with this fqn, on any real device; None if it has no values yet."""


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A place in the module tree that holds a parameter. A tied parameter has several."""

    module: nn.Module
    name: str


Original = tuple[str, nn.Parameter, tuple[Site, ...]]
"""A parameter to be sharded: its fully qualified name, itself, and every attribute of a module that holds it."""


@dataclass(eq=False)
class UnitPlan:
    """A module that becomes a unit, and the parameters that the unit owns."""

    fqn: str
    module: nn.Module
    ancestors: tuple[UnitPlan, ...]
    """The units around it, outermost first."""
    parameters: list[Original] = field(default_factory=list)
    modules: list[nn.Module] = field(init=False)
    """The modules whose forwards use the parameters: the module itself, unless a review says otherwise."""

    def __post_init__(self) -> None:
        self.modules = [self.module]


def foreign_parameter(fqn: str, held: object) -> UsageError:
    """Return the error for a module that holds another tensor than the parameter that sharding put there."""
    if torch.compiler.is_exporting():
        return UsageError(
            f"torch.export of a sharded model, whose {fqn!r} is not there as a whole: export it, also by "
            "torch.onnx.export or torch.jit.trace, inside sw.unsharded(model)"
        )
    if held is None:
        return UsageError(
            f"parameter {fqn!r} was removed from its module after sw.shard, as pruning, weight_norm and other "
            "parametrizations do: apply them before sw.shard"
        )
    if isinstance(held, ShardedParameter):
        why = "another sharded tensor, as torch.func.functional_call does: a unit can compute only with its own shard"
    else:
        why = f"a {type(held).__name__} after sw.shard"
    return UsageError(
        f"parameter {fqn!r} was replaced by {why}; change weights in place inside sw.unsharded(model, writeback=True), "
        "where functional_call works on full tensors, or replace modules before sharding"
    )


def inherit(heir: nn.Parameter, original: nn.Parameter) -> nn.Parameter:
    """Give `heir` the attributes and hooks of the parameter that it replaces; returns it."""
    # Attributes that the heir has already stay: fake tensors keep their device there.
    heir.__dict__.update({name: value for name, value in original.__dict__.items() if name not in heir.__dict__})
    heir._backward_hooks = original._backward_hooks
    heir._post_accumulate_grad_hooks = original._post_accumulate_grad_hooks
    return heir

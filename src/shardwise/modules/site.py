"""Where a parameter stands in the module tree, and what it is besides its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A place in the module tree that holds a parameter. Tied parameters have several."""

    module: nn.Module
    name: str


def inherit(heir: nn.Parameter, original: nn.Parameter) -> nn.Parameter:
    """Give `heir` the attributes and hooks of the parameter that it replaces; returns it."""
    # What the heir has already is its own: fake tensors keep their device there.
    heir.__dict__.update({name: value for name, value in original.__dict__.items() if name not in heir.__dict__})
    heir._backward_hooks = original._backward_hooks
    heir._post_accumulate_grad_hooks = original._post_accumulate_grad_hooks
    return heir

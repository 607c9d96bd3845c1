"""`backward(inputs=list(model.parameters()))`: the graph ends at the leaves that modules computed with.

Torch finds no way from a loss to the outer faces and would leave every gradient out without a word.
(`torch.autograd.grad` says itself that they were not used.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from shardwise.sharded.parameter import ShardedParameter


def to_leaves(backward: Callable[..., None]) -> Callable[..., None]:
    """`torch.autograd.backward`, but that in `inputs` a sharded model's parameter means the leaf of its unit."""

    @wraps(backward)
    def backward_to_leaves(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        if isinstance(inputs, Tensor):
            inputs = _leaf(inputs)
        elif isinstance(inputs, dict):
            inputs = {name: _leaf(item) for name, item in inputs.items()}
        elif inputs is not None and not isinstance(inputs, GradientEdge):
            inputs = [_leaf(item) for item in inputs]
        backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)

    return backward_to_leaves


def _leaf(item: Any) -> Any:
    """Of a sharded model's parameter what its gradient comes to; anything else is what it is."""
    inner: Tensor | None = item.inner if type(item) is ShardedParameter else None
    return item if inner is None else inner

"""A sharded model's parameters as the `inputs` of a backward: the graph ends at the leaves that modules computed with.

Torch finds no way from a loss to the outer faces: `backward(inputs=...)` would leave every gradient out, and
`torch.autograd.grad` give None or zeros, without a word. The first is told the leaves. The second would give this
rank's gradients, unreduced, since nothing tells the engine where they go: it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from torch import Tensor

from shardwise.errors import UsageError
from shardwise.sharded.parameter import ShardedParameter, outer_face

RunBackward = Callable[..., Any]


def with_leaves(run_backward: RunBackward) -> RunBackward:
    """What `torch.autograd.backward` and `torch.autograd.grad` both come to, however they were imported, but that in
    its inputs a sharded model's parameter means the leaf of its unit; `grad` raises UsageError for one."""

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
        return run_backward(
            outputs, grads, retain_graph, create_graph, leaves, *args, accumulate_grad=accumulate_grad, **kwargs
        )

    return run


def _leaves(item: Any) -> tuple[Any, ...]:
    """Of a sharded model's parameter what its gradients come to: the leaf that modules computed with, and the outer
    face for a penalty in the loss. Anything else is what it is."""
    inner: Tensor | None = item.inner if type(item) is ShardedParameter else None
    return (item,) if inner is None else (inner, item)


def _no_parameter(item: Any) -> tuple[Any, ...]:
    """The item, unless it is a sharded model's parameter, by either face."""
    if not isinstance(item, Tensor):
        return (item,)
    face = item if isinstance(item, ShardedParameter) else outer_face(item)
    if face is not None and face.inner is not None:
        raise UsageError(
            f"torch.autograd.grad over the sharded parameter {face.fqn!r}: its gradient would be this rank's alone, "
            "not the mean over ranks. Call loss.backward(inputs=[...]) with the parameters and read their .grad, or "
            "work in sw.unsharded(model)"
        )
    return (item,)

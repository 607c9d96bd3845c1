"""Optimizer state of a sharded parameter, cut as the parameter is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import Placement, ShardedParameter, same_cut

NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""Names of state in torch's optimizers that is one number whatever the parameter's shape, even for a 0-d parameter."""


Place = Callable[[Tensor, tuple[int, ...]], Placement | None]
"""Returns the placement of an optimizer's state of that shape for a parameter; None: the parameter's own."""


def cut_state(parameter: ShardedParameter, state: Mapping[str, Any], place: Place | None = None) -> dict[str, Any]:
    """Return the state of one parameter, with full tensors cut to this rank's pieces. No communication: every rank must
    be given equal numbers.

    Args:
        place: for an optimizer that keeps state of other shapes than the parameter's.

    Raises UsageError for a tensor that neither has the parameter's shape nor is one number, and for pieces that hold
    other elements than the parameter's.
    """
    return {name: _cut(parameter, name, value, place) for name, value in state.items()}


def _cut(parameter: ShardedParameter, name: str, value: Any, place: Place | None) -> Any:
    own = place(parameter, tuple(value.shape)) if place is not None and isinstance(value, Tensor) else None
    placement = own or parameter.placement
    if isinstance(value, ShardedParameter):
        if same_cut(value.placement, placement):
            return value
        raise UsageError(
            f"the optimizer's state {name!r} of {parameter.fqn!r} {tuple(parameter.shape)} was cut for "
            f"{value.fqn!r} {tuple(value.shape)}, or for another number of ranks: save and load with sw.checkpoint"
        )
    if not isinstance(value, Tensor) or name in NUMBERS:
        return value
    if value.shape == placement.shape:
        piece = placement.piece(value.detach())
        return ShardedParameter(piece.to(parameter.device, copy=True), placement)
    if value.ndim <= 1 and value.numel() == 1:
        return value
    raise UsageError(
        f"the optimizer's state {name!r} of {parameter.fqn!r} has the shape {tuple(value.shape)}, not the parameter's "
        f"{tuple(parameter.shape)}: it belongs to another parameter, or to an optimizer that is not elementwise"
    )

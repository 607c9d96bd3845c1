"""Unscaling gradients for torch's GradScaler: an inf or NaN that one rank finds is found by all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from shardwise.sharded.at_rest import pieces_of
from shardwise.sharded.elementwise import note_writes
from shardwise.sharded.parameter import Handler, ShardedParameter, register_operations, slice_by_slice


def attach() -> None:
    """Let `torch.amp.GradScaler` unscale lists of sharded gradients in place."""
    register_operations(_handler)


def _handler(func: OpOverload) -> Handler | None:
    return _unscale if func._schema.name == "aten::_amp_foreach_non_finite_check_and_unscale_" else None


def _unscale(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Unscale the pieces, then `all_reduce` one number in each shard group. Replicas hold equal gradients, so they find
    the same without communication."""
    gradients, found_inf, inv_scale = args
    sharded = [gradient for gradient in gradients if isinstance(gradient, ShardedParameter)]
    for where in slice_by_slice([gradients]):
        _unscale_pieces([gradients[i] for i in where], func, found_inf, inv_scale, kwargs)
    for group in dict.fromkeys(gradient.placement.shard_group for gradient in sharded):
        if group.world_size > 1:
            group.all_reduce(found_inf, "max").wait()


def _unscale_pieces(
    gradients: Sequence[Tensor], func: OpOverload, found_inf: Tensor, inv_scale: Tensor, kwargs: Mapping[str, Any]
) -> None:
    with pieces_of(gradients) as pieces:
        here = pieces.tensors[0].device
        found = found_inf.to(here)
        func(pieces.tensors, found, inv_scale.to(here), **kwargs)
        if found is not found_inf:
            found_inf.copy_(found)
        note_writes(gradients, pieces.tensors)

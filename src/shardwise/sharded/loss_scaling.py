"""Unscaling gradients for torch's GradScaler: an inf or NaN that one rank finds is found by all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from shardwise.sharded.parameter import Handler, ShardedParameter, register_operations


@register_operations
def handler(func: OpOverload) -> Handler | None:
    """What unscales a list of gradients in place, or None for other operations."""
    return _unscale if func._schema.name == "aten::_amp_foreach_non_finite_check_and_unscale_" else None


def _unscale(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """On the pieces, then one `all_reduce` of one number for each shard group. Replicas hold equal gradients, so they
    find the same without being asked."""
    gradients, found_inf, inv_scale = args
    sharded = [gradient for gradient in gradients if isinstance(gradient, ShardedParameter)]
    pieces = [gradient.local if isinstance(gradient, ShardedParameter) else gradient for gradient in gradients]
    func(pieces, found_inf, inv_scale, **kwargs)
    torch.autograd.graph.increment_version(pieces)
    for group in dict.fromkeys(gradient.placement.shard_group for gradient in sharded):
        if group.world_size > 1:
            group.all_reduce(found_inf, "max").wait()

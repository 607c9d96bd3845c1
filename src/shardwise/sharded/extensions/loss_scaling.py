"""Unscaling gradients for torch's GradScaler: an inf or NaN that one rank finds is found by all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from shardwise.fsdp.sharded_parameter import Handler, ShardedParameter, register_operations


def attach() -> None:
    """Let `torch.amp.GradScaler` unscale lists of sharded gradients in place."""
    register_operations(_handler)


def _handler(func: OpOverload) -> Handler | None:
    return unscale if func._schema.name == "aten::_amp_foreach_non_finite_check_and_unscale_" else None


def unscale(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Unscale the pieces, then let ranks agree."""
    gradients, *others = args
    pieces = [gradient.local if isinstance(gradient, ShardedParameter) else gradient for gradient in gradients]
    func(pieces, *others, **kwargs)
    torch.autograd.graph.increment_version(pieces)
    agree(gradients, others[0])


def agree(gradients: Sequence[Tensor], found_inf: Tensor) -> None:
    """Let an inf or NaN that one rank found be found by all: one `all_reduce` of a number in each shard group. Replicas
    hold equal gradients, so they find the same without communication."""
    sharded = [gradient for gradient in gradients if isinstance(gradient, ShardedParameter)]
    for group in dict.fromkeys(group for gradient in sharded for group in gradient.placement.groups):
        if group.world_size > 1:
            group.all_reduce(found_inf, "max").wait()

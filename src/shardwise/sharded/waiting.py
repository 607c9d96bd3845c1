"""Gradients that a backward inside `sw.no_sync` left to be reduced later, and how users let go of them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from shardwise.sharded.parameter import ShardedParameter


def drop_waiting(parameters: Iterable[Tensor]) -> None:
    """Drop what waits to be reduced of these parameters' gradients. Local; every rank must do so alike."""
    sharded = [parameter for parameter in parameters if type(parameter) is ShardedParameter]
    for unit in {parameter.unit for parameter in sharded}:
        if unit is not None:
            unit.drop_gradients(sharded)

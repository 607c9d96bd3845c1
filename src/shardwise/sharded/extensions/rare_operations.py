"""Operations that few optimizers need: complex numbers seen as pairs of real ones, a number put by a mask (Rprop)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._ops import OpOverload

from shardwise.errors import UsageError
from shardwise.fsdp.operations import piece_of
from shardwise.fsdp.sharded_parameter import (
    Handler,
    Placement,
    ShardedParameter,
    first_sharded,
    register_operations,
)

_pairs: WeakKeyDictionary[Placement, Placement] = WeakKeyDictionary()
_singles: WeakKeyDictionary[Placement, Placement] = WeakKeyDictionary()
"""By placement: that of the same elements seen the other way, one object for all tensors that are cut alike."""


def attach() -> None:
    """Let these operations run on sharded tensors."""
    register_operations(lambda func: _BY_NAME.get(func._schema.name))


def _as_real(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ShardedParameter:
    """View a complex parameter as real pairs, as optimizers do: a piece of whole elements is a piece of whole pairs.
    The view has a version of its own, but the unit learns of a step's writes without it (`Owner.stepped`)."""
    return ShardedParameter(torch.view_as_real(args[0].local).view(-1), _as_pairs(args[0].placement))


def _as_complex(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ShardedParameter:
    """View real pairs as complex numbers again. Pairs are never cut: slices and parameters start on multiples of 16
    bytes."""
    return ShardedParameter(torch.view_as_complex(args[0].local.view(-1, 2)), _as_single(args[0].placement))


def _as_pairs(placement: Placement) -> Placement:
    """Return the placement of complex elements, seen as pairs of real ones."""
    if placement not in _pairs:
        entry = placement.layout.entries[placement.index]
        seen = replace(entry, shape=(*entry.shape, 2), start=2 * entry.start, numel=2 * entry.numel)
        layout = replace(placement.layout, entries=(seen,), numel=2 * placement.layout.numel)
        _pairs[placement] = Placement(layout, 0, placement.shard_group, placement.replicas)
    return _pairs[placement]


def _as_single(placement: Placement) -> Placement:
    """Return the placement of pairs of real elements, seen as complex ones. Slices hold whole pairs."""
    if placement not in _singles:
        entry = placement.layout.entries[placement.index]
        seen = replace(entry, shape=entry.shape[:-1], start=entry.start // 2, numel=entry.numel // 2)
        layout = replace(placement.layout, entries=(seen,), numel=placement.layout.numel // 2)
        _singles[placement] = Placement(layout, 0, placement.shard_group, placement.replicas)
    return _singles[placement]


def _put_by_mask(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ShardedParameter:
    """Run `tensor[mask] = number` (Rprop), the only indexing that is elementwise."""
    target, indices, value = args[:3]
    by_mask = len(indices) == 1 and isinstance(indices[0], ShardedParameter) and indices[0].dtype == torch.bool
    if not isinstance(target, ShardedParameter) or not by_mask:
        sharded = first_sharded((target, indices, value), {})
        raise UsageError(
            f"{func} of the sharded {sharded.fqn!r}: only tensor[mask] = number works, with a mask made from it. "
            "Use sw.unsharded(model, writeback=True)"
        )
    piece = target.local
    func(piece, [piece_of(indices[0], target, func)], piece_of(value, target, func), *args[3:])
    torch.autograd.graph.increment_version(piece)
    return target


_BY_NAME: dict[str, Handler] = {
    "aten::view_as_real": _as_real,
    "aten::view_as_complex": _as_complex,
    "aten::index_put_": _put_by_mask,
}

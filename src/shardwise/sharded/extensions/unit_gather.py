"""Full tensors of a model's parameters, for inspection and for saving, gathered a unit at a time.

They are mostly requested one after another, so those of a unit are gathered together: in one collective for each flat
buffer, when its first parameter is requested. The others are cut out of the buffer, which is kept until the last one
was requested, one is requested out of turn, the weights are written, or the next forward in grad mode begins. While
parameters of units below are requested, the buffers of the units around them are kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor

from shardwise.fsdp.collectives import BufferKind, Collectives, FlatSpan
from shardwise.fsdp.sharded_parameter import Placement, ShardedParameter, add_methods, gather_fragments


class OneUnit(Protocol):
    """A unit, whose parameters are gathered together."""

    @property
    def version(self) -> int:
        """Grows whenever its weights are written, on every rank alike."""

    @property
    def ancestors(self) -> Sequence[OneUnit]:
        """The units around it."""


@dataclass(slots=True)
class _Gathered:
    """One flat buffer of a unit, whole."""

    flat: Tensor
    version: int
    """Version of the unit's weights in it."""
    next: int
    """Index of the parameter that must be requested next."""


_Kept = weakref.WeakKeyDictionary[OneUnit, dict[str, _Gathered]]
_kept: weakref.WeakKeyDictionary[Collectives, _Kept] = weakref.WeakKeyDictionary()
"""Buffers that are not used up, by group of ranks, unit and name of the first parameter; the same on every rank."""


def attach() -> None:
    """Gather a unit's parameters together."""
    add_methods(gather_flat=_gathered)


def _gathered(tensor: ShardedParameter) -> Tensor:
    """See `ShardedParameter.gather_flat`."""
    placement, parameter = tensor.placement, tensor.parameter
    layout, unit = placement.layout, None if parameter is None else parameter.unit
    shares = layout.world_size > 1 and len(layout.entries) > 1 and layout.numel > 0
    flat = None
    if shares and parameter is not None and unit is not None:
        flat = _of_unit(placement, tensor, cast(OneUnit, unit))
    if flat is None:
        return gather_fragments(placement, tensor.peek().detach())
    entry = layout.entries[placement.index]
    return flat[entry.start : entry.stop].clone()


def forget(units: Iterable[OneUnit]) -> None:
    """Drop the buffers that are kept of these units. No communication, but every rank must do so."""
    for kept in _kept.values():
        for unit in units if kept else ():
            kept.pop(unit, None)


def _of_unit(placement: Placement, tensor: ShardedParameter, unit: OneUnit) -> Tensor | None:
    """Return the flat buffer that the parameter lies in: gathered now if it is the first one there, or the kept one if
    the parameter is the next in turn and the weights have not changed; else None."""
    kept = _kept.setdefault(placement.shard_group, weakref.WeakKeyDictionary())
    first = placement.layout.entries[0].fqn
    gathered = kept.get(unit, {}).pop(first, None)
    if placement.index == 0:
        for other in [other for other in list(kept) if other is not unit and other not in unit.ancestors]:
            del kept[other]
        gathered = _Gathered(_gather(placement, tensor.peek().detach()), unit.version, 0)
    elif gathered is None or gathered.next != placement.index or gathered.version != unit.version:
        return None
    gathered.next += 1
    if gathered.next < len(placement.layout.entries):
        kept.setdefault(unit, {})[first] = gathered
    return gathered.flat


def _gather(placement: Placement, local: Tensor) -> Tensor:
    group, layout = placement.shard_group, placement.layout
    shard_bytes = layout.shard_numel * local.itemsize
    own = local.as_strided((layout.shard_numel,), (1,), local.storage_offset() - placement.fragment.offset)
    buffer = group.allocate(group.world_size * shard_bytes, BufferKind.GATHER)
    group.claim(buffer)
    flat = buffer.bytes.view(local.dtype)
    with group.writing(buffer, after=group.mark()):
        flat[group.rank * layout.shard_numel : (group.rank + 1) * layout.shard_numel].copy_(own)
    group.all_gather(buffer, (FlatSpan(0, shard_bytes),)).wait()
    whole = flat.clone()
    group.settle()
    group.release(buffer)
    group.drop(buffer)
    return whole

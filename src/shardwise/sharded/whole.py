"""Full tensors of pieces, for looking at and for saving.

One tensor alone is put together of the fragments of the ranks that have some of it. Of a model's parameters, which are
mostly asked for one after another, a unit's are gathered together: in one collective for each flat buffer, when its
first parameter is asked for. The others are cut out of it, until the last one was, another is asked for out of turn, or
the weights were written, or the next forward begins that wants gradients. While units below are asked for, those around
them stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardwise.comm.protocol import BufferKind, Collectives, FlatSpan
from shardwise.sharded.placement import Placement


class Pieces(Protocol):
    """A tensor of which each rank has a piece."""

    def peek(self) -> Tensor:
        """This rank's: 1-D."""

    @property
    def placement(self) -> Placement:
        """Where it lies in the whole."""


class OneUnit(Protocol):
    """Whose parameters are gathered together."""

    @property
    def version(self) -> int:
        """Grows whenever its weights are written, on every rank alike."""

    @property
    def ancestors(self) -> Sequence[OneUnit]:
        """The units around it."""


@dataclass(slots=True)
class _Gathered:
    """One flat buffer of a unit's, whole."""

    flat: Tensor
    version: int
    """Of the unit's weights."""
    next: int
    """The parameter that is to be asked for next."""


_Kept = weakref.WeakKeyDictionary[OneUnit, dict[str, _Gathered]]
_kept: weakref.WeakKeyDictionary[Collectives, _Kept] = weakref.WeakKeyDictionary()
"""Those that are not used up, by group of ranks, unit and first parameter: every rank has the same ones."""


def full_tensor(tensor: Pieces, unit: OneUnit | None) -> Tensor:
    """A new plain tensor of the global shape. Every rank of the shard group must call this.

    Args:
        tensor: what is wanted whole.
        unit: of a model's parameter, whose unit's others are going to be asked for; None for any other tensor.
    """
    placement = tensor.placement
    layout = placement.layout
    flat = None
    if unit is not None and layout.world_size > 1 and len(layout.entries) > 1 and layout.numel:
        flat = _of_unit(placement, tensor, unit)
    if flat is None:
        return of_fragments(placement, tensor.peek().detach())
    entry = placement.layout.entries[placement.index]
    return flat[entry.start : entry.stop].view(entry.shape).clone()


def forget(units: Iterable[OneUnit]) -> None:
    """Drop what is kept of these units. No communication, but every rank must do so."""
    for kept in _kept.values():
        for unit in units if kept else ():
            kept.pop(unit, None)


def of_fragments(placement: Placement, local: Tensor) -> Tensor:
    """A tensor of which each rank has its piece, `local`. Every rank of the shard group must call this."""
    group, own = placement.shard_group, placement.fragment
    flat = torch.empty(placement.layout.entries[placement.index].numel, dtype=local.dtype, device=local.device)
    flat[own.start : own.stop].copy_(local)
    for rank in range(group.world_size):
        piece = placement.layout.fragment(placement.index, rank)
        if piece.numel:
            group.broadcast(flat[piece.start : piece.stop], rank)
    return flat.view(placement.shape)


def _of_unit(placement: Placement, tensor: Pieces, unit: OneUnit) -> Tensor | None:
    """The flat buffer that the parameter lies in, gathered now if it is the first one there and else if it is the next;
    None if it is neither."""
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

"""Where one parameter lives: its place in a unit's flat layout and the group over which that is cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from shardwise import accelerators
from shardwise.comm.protocol import Collectives
from shardwise.layout.flat import FlatLayout
from shardwise.layout.fragment import Fragment


@dataclass(frozen=True, eq=False)
class Placement:
    """The place of a parameter, its gradient and its optimizer state, which are all cut alike and share this object."""

    layout: FlatLayout
    index: int
    """Entry of `layout` that is this parameter."""
    shard_group: Collectives
    """The ranks that hold the slices."""
    replicas: Collectives | None = None
    """The ranks that hold the same slice of other copies; None until they are known."""

    @property
    def fqn(self) -> str:
        """The parameter's name in the model."""
        return self.layout.entries[self.index].fqn

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.layout.entries[self.index].shape

    @cached_property
    def fragment(self) -> Fragment:
        """This rank's piece."""
        return self.layout.fragment(self.index, self.shard_group.rank)

    @cached_property
    def as_real(self) -> Placement:
        """The placement of the same complex elements, seen as pairs of real ones."""
        entry = self.layout.entries[self.index]
        pairs = replace(entry, shape=(*entry.shape, 2), start=2 * entry.start, numel=2 * entry.numel)
        layout = replace(self.layout, entries=(pairs,), numel=2 * self.layout.numel)
        return Placement(layout, 0, self.shard_group, self.replicas)

    @cached_property
    def as_complex(self) -> Placement:
        """The placement of the same pairs of real elements, seen as complex ones. Slices hold whole pairs."""
        entry = self.layout.entries[self.index]
        whole = replace(entry, shape=entry.shape[:-1], start=entry.start // 2, numel=entry.numel // 2)
        layout = replace(self.layout, entries=(whole,), numel=self.layout.numel // 2)
        return Placement(layout, 0, self.shard_group, self.replicas)


def same_cut(a: Placement, b: Placement) -> bool:
    """Whether two tensors have the same shape, and the same elements on every rank. All ranks get the same answer, so
    that all of them raise or none."""
    if a is b:
        return True
    if a.shape != b.shape or a.layout.world_size != b.layout.world_size:
        return False
    start_a, start_b = (placement.layout.entries[placement.index].start for placement in (a, b))
    return a.layout.world_size == 1 or (start_a == start_b and a.layout.shard_numel == b.layout.shard_numel)


def gather_fragments(placement: Placement, local: Tensor) -> Tensor:
    """Return the whole of a tensor of which each rank has its piece `local`. Every rank of the shard group must call
    this. It is on the device of `local`."""
    group, own = placement.shard_group, placement.fragment
    device = group.device if local.device == accelerators.CPU else local.device  # state of a step on the host
    flat = torch.empty(placement.layout.entries[placement.index].numel, dtype=local.dtype, device=device)
    flat[own.start : own.stop].copy_(local)
    for rank in range(group.world_size):
        piece = placement.layout.fragment(placement.index, rank)
        if piece.numel:
            group.broadcast(flat[piece.start : piece.stop], rank)
    return flat.view(placement.shape).to(local.device)

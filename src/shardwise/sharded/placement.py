"""Where one parameter lives: its place in a unit's flat layout and the group over which that is cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.comm.protocol import Collectives
from shardwise.layout.flat import FlatLayout
from shardwise.layout.fragment import Fragment


@dataclass(frozen=True, eq=False)
class Placement:
    """Shared by a parameter, its gradient and its optimizer state: all are cut alike."""

    layout: FlatLayout
    index: int
    """Entry of `layout` that is this parameter."""
    shard_group: Collectives
    """The ranks that hold the slices. Replicas (a hybrid's other groups) hold equal ones."""

    @property
    def fqn(self) -> str:
        """The parameter's name in the model."""
        return self.layout.entries[self.index].fqn

    @property
    def shape(self) -> tuple[int, ...]:
        """Global."""
        return self.layout.entries[self.index].shape

    @cached_property
    def fragment(self) -> Fragment:
        """This rank's piece."""
        return self.layout.fragment(self.index, self.shard_group.rank)

    @cached_property
    def as_real(self) -> Placement:
        """Of the same complex elements as pairs of real ones."""
        entry = self.layout.entries[self.index]
        pairs = replace(entry, shape=(*entry.shape, 2), start=2 * entry.start, numel=2 * entry.numel)
        layout = replace(self.layout, entries=(pairs,), numel=2 * self.layout.numel)
        return Placement(layout, 0, self.shard_group)

    @cached_property
    def as_complex(self) -> Placement:
        """Of the same pairs of real elements as complex ones. Slices are of whole pairs."""
        entry = self.layout.entries[self.index]
        whole = replace(entry, shape=entry.shape[:-1], start=entry.start // 2, numel=entry.numel // 2)
        layout = replace(self.layout, entries=(whole,), numel=self.layout.numel // 2)
        return Placement(layout, 0, self.shard_group)


def same_cut(a: Placement, b: Placement) -> bool:
    """Whether two tensors of one shape have the same elements on every rank. All ranks answer alike, so that an error
    is everybody's."""
    if a is b:
        return True
    if a.shape != b.shape or a.layout.world_size != b.layout.world_size:
        return False
    start_a, start_b = (placement.layout.entries[placement.index].start for placement in (a, b))
    return a.layout.world_size == 1 or (start_a == start_b and a.layout.shard_numel == b.layout.shard_numel)

"""Where one parameter lives: its place in a unit's flat layout and the group over which that is cut."""

from __future__ import annotations

from dataclasses import dataclass
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
        return self.layout.entries[self.index].fqn

    @property
    def shape(self) -> tuple[int, ...]:
        """Global."""
        return self.layout.entries[self.index].shape

    @cached_property
    def fragment(self) -> Fragment:
        """This rank's piece."""
        return self.layout.fragment(self.index, self.shard_group.rank)

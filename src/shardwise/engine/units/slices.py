"""This rank's slices of a unit: what its gathers start from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardwise.comm.protocol import FINISHED, Collectives, FlatSpan, Work
from shardwise.engine.units.arena import Slot

if TYPE_CHECKING:
    from shardwise.engine.units.group import Group


class Slices:
    """Of a unit over one group of ranks, by parameter group, and where they go in a slot."""

    def __init__(self, groups: Sequence[Group], collectives: Collectives, own: Sequence[Tensor] | None) -> None:
        """`own`: memory of their own; None: the groups' shards, wherever those are."""
        self.collectives = collectives
        self._groups = groups
        self._own = own
        if own is None and not any(group.home for group in groups):
            self._own = [group.shard for group in groups]
        """None: they come when they are asked for."""
        self.version = -1
        """Of the weights that are in them."""
        self._written: Work = FINISHED
        numels = [group.dtypes.kept_numel(group.layout.numel // collectives.world_size) for group in groups]
        self.spans = tuple(
            FlatSpan(group.gathered_start, numel * group.dtypes.gathered.itemsize)
            for group, numel in zip(groups, numels, strict=True)
        )
        self._places = [
            (span.start + collectives.rank * span.shard_bytes, numel, group.dtypes.gathered)
            for span, group, numel in zip(self.spans, groups, numels, strict=True)
        ]

    @property
    def pieces(self) -> Sequence[Tensor]:
        """By group. Shards that rest elsewhere come now, and stay while there is a view of them; UsageError if that
        fails."""
        return [group.shard for group in self._groups] if self._own is None else self._own

    def come(self) -> Sequence[Tensor]:
        """Have shards that rest elsewhere come to memory, and stay while what this returns is held. Raises UsageError
        if that fails."""
        return [group.come() for group in self._groups] if self._own is None else ()

    def were_written(self, version: int, work: Work) -> None:
        """`work` has put weights of that version into them: copies wait for it, and for nothing later."""
        self.version = version
        self._written = work

    def write_to(self, slot: Slot[Any]) -> None:
        """Copy the slices, cast, to their final places in a slot."""
        with self.collectives.writing(slot.buffer, after=self._written):
            for group, piece, place in zip(self._groups, self.pieces, self._places, strict=True):
                group.send(slot.flat(*place), piece)

    def read_from(self, slot: Slot[Any], version: int) -> None:
        """Take the slices out of a slot with weights of that version."""
        for piece, place in zip(self.pieces, self._places, strict=True):
            piece.copy_(slot.flat(*place))
        self.were_written(version, self.collectives.mark())

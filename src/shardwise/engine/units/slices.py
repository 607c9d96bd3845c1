"""This rank's slices of a unit, from which its gathers start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardwise.comm.protocol import FINISHED, Collectives, FlatSpan, Work
from shardwise.engine.units.arena import Slot

if TYPE_CHECKING:
    from shardwise.engine.units.group import Group


class Slices:
    """The slices of a unit's groups over one group of ranks, and their places in a slot."""

    def __init__(self, groups: Sequence[Group], collectives: Collectives, own: Sequence[Tensor] | None) -> None:
        """`own`: memory for the slices, those of a secondary shard; None: they are the groups' shards."""
        self.collectives = collectives
        self._groups = groups
        self._own = own
        if own is None and all(group.is_resident for group in groups):
            self._own = [group.shard for group in groups]
        """The slices, by group; None if some are not resident, and so are loaded when they are asked for."""
        self.version = -1
        """Version of the weights in the slices."""
        self._written: Work = FINISHED
        numels = [group.dtypes.stored_numel(group.layout.numel // collectives.world_size) for group in groups]
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
        """The slices, by group. Shards that are not resident are loaded, and stay in memory while there is a view of
        them. Raises UsageError if loading fails."""
        return [group.shard for group in self._groups] if self._own is None else self._own

    def load(self) -> Sequence[Tensor | None]:
        """Load shards that are not resident, and keep them in memory while the returned tensors are held. Raises
        UsageError if loading fails."""
        return [group.load() for group in self._groups] if self._own is None else ()

    def were_written(self, version: int, work: Work) -> None:
        """Note that `work` wrote weights of that version into the slices: copies wait for it, and for nothing later."""
        self.version = version
        self._written = work

    def write_to(self, slot: Slot[Any]) -> None:
        """Copy the slices, cast, to their final places in a slot."""
        with self.collectives.writing(slot.buffer, after=self._written):
            for group, piece, place in zip(self._groups, self.pieces, self._places, strict=True):
                group.pre_all_gather(slot.flat(*place), piece)

    def read_from(self, slot: Slot[Any], version: int) -> None:
        """Copy the slices out of a slot that holds weights of that version."""
        for piece, place in zip(self.pieces, self._places, strict=True):
            piece.copy_(slot.flat(*place))
        self.were_written(version, self.collectives.mark())

"""This rank's slices of a unit: what its gathers start from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardwise.comm.protocol import FINISHED, Collectives, Region, Work
from shardwise.engine.units.arena import Slot

if TYPE_CHECKING:
    from shardwise.engine.units.group import Group


class Slices:
    """Of a unit over one group of ranks, by parameter group, and where they go in a slot."""

    def __init__(self, groups: Sequence[Group], collectives: Collectives, pieces: Sequence[Tensor]) -> None:
        self.collectives = collectives
        self.pieces = pieces
        self.version = -1
        """Of the weights that are in them."""
        self._written: Work = FINISHED
        self.regions = tuple(
            Region(group.unsharded_start, piece.numel() * group.dtypes.compute.itemsize)
            for group, piece in zip(groups, pieces, strict=True)
        )
        self._places = [
            (region.start + collectives.rank * region.shard_bytes, piece.numel(), group.dtypes.compute)
            for region, group, piece in zip(self.regions, groups, pieces, strict=True)
        ]

    def were_written(self, version: int, work: Work) -> None:
        """`work` has put weights of that version into them: copies wait for it, and for nothing later."""
        self.version = version
        self._written = work

    def write_to(self, slot: Slot[Any]) -> None:
        """Copy the slices, cast, to their final places in a slot."""
        with self.collectives.writing(slot.buffer, after=self._written):
            for piece, place in zip(self.pieces, self._places, strict=True):
                slot.flat(*place).copy_(piece)

    def read_from(self, slot: Slot[Any], version: int) -> None:
        """Take the slices out of a slot with weights of that version."""
        for piece, place in zip(self.pieces, self._places, strict=True):
            piece.copy_(slot.flat(*place))
        self.were_written(version, self.collectives.mark())

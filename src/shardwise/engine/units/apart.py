"""This rank's slices of a unit's sums, in memory of their own: where sums of the shard group wait for the replicas, and
where a user's hook finds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.protocol import Reduction
from shardwise.engine.units.arena import Slot
from shardwise.engine.units.group import Group


class Apart:
    """The slices of one unit's trainable groups."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._trainable = [group for group in groups if group.trainable]
        with torch.inference_mode(False):
            self.slices: list[Tensor] = [
                torch.empty(group.layout.shard_numel, dtype=group.dtypes.reduce, device=group.device)
                for group in self._trainable
            ]
        """By trainable group: 1-D, reduce dtype."""
        self.is_waiting = False
        """Whether the slices hold sums that are not summed over the replicas yet."""
        self.keys: set[tuple[int, int]] = set()
        """(group, parameter) of the gradients in the slices that are not handed out yet; alike on every rank."""

    @property
    def nbytes(self) -> int:
        return sum(own.nbytes for own in self.slices)

    def reductions(self, slot: Slot[Any]) -> tuple[Reduction, ...]:
        """Return the reductions of a reduce slot into the slices. They add to sums that wait there."""
        pairs = zip(self._trainable, self.slices, strict=True)
        return tuple(Reduction(group.flat_gradients(slot), own, accumulate=self.is_waiting) for group, own in pairs)

    def wait(self, is_waiting: bool) -> None:
        """Set whether what was reduced last waits for the replicas."""
        self.is_waiting = is_waiting

    def drop(self, key: tuple[int, int]) -> None:
        """Forget a gradient that waits, and zero it."""
        if key in self.keys:
            self.keys.discard(key)
            group = self._groups[key[0]]
            fragment = group.sharded[key[1]].fragment
            own = self.slices[self._trainable.index(group)]
            own[fragment.offset : fragment.offset + fragment.numel].zero_()

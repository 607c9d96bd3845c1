"""Reductions under way, in the order in which they were started, and the work left to do when one is over."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shardwise.comm.protocol import Work
from shardwise.engine.units.arena import Slot
from shardwise.engine.units.unit import Unit


@dataclass(slots=True, eq=False)
class Flight:
    """Sums of one unit under way, and the slot that they use until they are complete."""

    unit: Unit
    slot: Slot[Unit] | None
    """None if an earlier flight of the unit has it."""
    works: Sequence[Work]
    slices: Sequence[Tensor] = ()
    """By trainable group: this rank's slice of the sum over all ranks, still to be added to the shard's gradient."""
    is_summed: bool = False
    """Whether the sums have been added to the shard's gradient."""


class InFlight(deque[Flight]):
    """The flights of one reducer. Those of one unit are finished in their order: the first of a backward overwrites the
    shard's gradient and later ones add to it."""

    def make_room(self, unit: Unit) -> None:
        """Called before sums of the unit begin. Gradients that are not resident need room in memory (an extension)."""

    def finish_all(self) -> None:
        """Wait for every flight and free its slot."""
        while self:
            self._complete(self[0])

    def finish_of(self, unit: Unit) -> None:
        """Wait for the flights of the unit and free their slots."""
        for flight in [flight for flight in self if flight.unit is unit]:
            self._complete(flight)

    def finish_in(self, slot: Slot[Unit]) -> None:
        """Wait for the flight that has the slot, if any, and free the slot."""
        for flight in [flight for flight in self if flight.slot is slot]:
            self._finish(flight)

    def finish_oldest(self, slots: Sequence[Slot[Unit]]) -> bool:
        """Wait for the oldest flight in any of these slots and free its slot. Returns whether there was one."""
        oldest = next((flight for flight in self if flight.slot in slots), None)
        if oldest is not None:
            self._finish(oldest)
        return oldest is not None

    def _finish(self, flight: Flight) -> None:
        for earlier in list(self) if self[0] is not flight else ():
            if earlier is flight:
                break
            if earlier.unit is flight.unit:
                self._complete(earlier)
        self._complete(flight)

    def _complete(self, flight: Flight) -> None:
        self.remove(flight)
        self.sum(flight)
        if flight.slot is not None:
            assert flight.slot.holder is flight.unit, f"a reduction of {flight.unit} lost its slot"
            flight.slot.free()

    def sum(self, flight: Flight) -> None:
        """Wait until the sums are in the shard's gradient, or where else they are written to. The flight keeps its
        slot. Flights of one unit must come here in their order."""
        if not flight.is_summed:
            self._add(flight)
        for group in flight.unit.groups:
            if group.trainable:
                group.gradients.leave()

    @staticmethod
    def _add(flight: Flight) -> None:
        for work in flight.works:
            work.wait()
        if flight.slices:
            groups = [group for group in flight.unit.groups if group.trainable]
            for group, own in zip(groups, flight.slices, strict=True):
                flight.unit.gradients.settle(own, *group.gradients.prepare_sum())
                group.gradients.leave()  # before the next group's slice takes a buffer
        flight.is_summed = True

"""Reductions under way, in the order in which they were started, and the work left to do when one is over."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shardwise.comm.protocol import Work
from shardwise.engine.units.arena import Slot
from shardwise.engine.units.gradients import UnitGradients
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

    @staticmethod
    def sum(flight: Flight) -> None:
        """Wait for the sums of a flight, which keeps its slot."""
        _sum(flight)
        _leave(flight.unit)

    def finish_all(self) -> None:
        """Wait for every flight and free its slot."""
        while self:
            self._complete(self[0])

    def sum_all(self) -> None:
        """Wait for the sums of every flight, but leave each its slot: slots must be freed at the same moments as
        otherwise, so that units are reduced in the same parts."""
        for flight in self:
            _sum(flight)

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
        _sum(flight)
        _leave(flight.unit)
        if flight.slot is not None:
            assert flight.slot.holder is flight.unit, f"a reduction of {flight.unit} lost its slot"
            flight.slot.free()


def _leave(unit: Unit) -> None:
    for group in unit.groups:
        if group.trainable:
            group.gradients.leave()


def _sum(flight: Flight) -> None:
    """Wait until the sums are in the shard's gradient, or apart. Flights of one unit must come here in their order."""
    if flight.is_summed:
        return
    for work in flight.works:
        work.wait()
    if flight.slices:
        groups = [group for group in flight.unit.groups if group.trainable]
        for group, own in zip(groups, flight.slices, strict=True):
            _settle(flight.unit.gradients, own, *group.gradients.prepare_sum())
            group.gradients.leave()  # before the next group's slice takes a buffer
    flight.is_summed = True


def _settle(gradients: UnitGradients, summed: Tensor, total: Tensor, accumulate: bool) -> None:
    """Add this rank's slice of a sum to the shard's gradient (or overwrite that), after a user's hook has seen it."""
    if gradients.reducing.hook is None:
        gradients.scaled.settle(total, summed, accumulate)
    else:
        summed.mul_(gradients.scaled.scale_of_sum(summed.dtype))
        gradients.reducing.hook(summed)
        (total.add_ if accumulate else total.copy_)(summed)

"""Reductions of one model's gradients: which unit collects in which slot, and when its slot is reduced.

When a unit's backward is over its reduce slot is reduced in one collective, whether or not this rank had all its
gradients: another rank may have had the others. Slots are taken and reduced where a unit's backward begins and ends,
and nowhere else; a gradient that meets no slot of its unit waits beside (`units/gradients.py`). Late ones are reduced
when backward ends. On CPUs the sum is taken in rank order over values scaled by 1 / world_size, so a step's result does
not depend on timing; on a device it is taken in the backend's order and then scaled (`BatchedAddition`).

A reduce slot is *free* (no holder), *collecting* (its holder's `gradients.slot`: gradients are written) or *reducing*
(one reduction in flight has it). Why nothing that graph order allows can lose a gradient:

- Only a free slot is taken. One that is reducing is finished first: a slot that a unit has for itself is taken
  again by the unit's next call, while the sum of the one before may still lie in it.
- Only `_start` takes a slot from collecting to reducing, and only `_complete` frees it then, when its sum has been
  added to the shard's gradient. Nobody else waits for a reduction.
- Reductions of one unit are finished in the order in which they were started: the first of a backward overwrites the
  shard's gradient and later ones add to it.
- A gradient that comes while its unit has no slot joins the next slot that the unit has; if any rank still holds
  one when backward ends, all ranks reduce that unit then.
- `no_sync` and a backward that raised leave slots collecting: the next backward goes on in them, or `abandon` frees
  them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from shardwise.comm.protocol import FINISHED, Reduction, Work
from shardwise.comm.summation import BatchedAddition, ScaledAddition
from shardwise.engine.backward_steps import BackwardSteps
from shardwise.engine.control import Control, Moment
from shardwise.engine.mesh import Mesh
from shardwise.engine.reduce_slots import ReduceSlots
from shardwise.engine.units.arena import Arena, Slot
from shardwise.engine.units.gradients import Fate, Key
from shardwise.engine.units.group import Group
from shardwise.engine.units.unit import Unit
from shardwise.errors import UsageError
from shardwise.sharded.penalties import hooks_run


@dataclass(slots=True, eq=False)
class _InFlight:
    """Sums under way and the slot that is theirs until they are there."""

    unit: Unit
    slot: Slot[Unit]
    works: Sequence[Work]
    slices: Sequence[Tensor] = ()
    """By trainable group: this rank's sum over all replicas, to be added to the shard's gradient."""
    is_summed: bool = False
    """The sums are in the shard's gradient."""


class Reducer:
    """Reduce slots and reductions of one engine. Everything here happens in graph order, alike on every rank."""

    def __init__(self, mesh: Mesh, control: Control, keeps_full: bool) -> None:
        """`keeps_full`: every unit has a full-size gradient buffer of its own (ZeRO-1)."""
        self._mesh = mesh
        self._control = control
        # Replicas exchange straight out of the slots when nothing is scattered before.
        self._collectives = mesh.replicate if mesh.shard.world_size == 1 else mesh.shard
        addition = BatchedAddition if self._collectives.on_streams else ScaledAddition
        self._scaled = addition(1.0 / mesh.world_size)
        self.slots = ReduceSlots(mesh, self._collectives, keeps_full)
        self._in_flight: deque[_InFlight] = deque()
        self._reduces = True
        """Off in `no_sync`."""
        self.steps = BackwardSteps(control)

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Backwards inside accumulate; the first one outside reduces the sum."""
        if self.steps.are_taken:
            self.steps.refuse("sw.no_sync", "each backward takes a step, so that gradients of several are never added")
        before, self._reduces = self._reduces, False
        try:
            yield
        finally:
            self._reduces = before

    @property
    def scratch_bytes(self) -> int:
        """Memory for sums of different dtypes."""
        return self._scaled.scratch_bytes

    def open(self, unit: Unit) -> None:
        """Give the unit a slot for its gradients. Called in graph order, never because a gradient came: all ranks take
        slots in one order, whichever gradients come to them."""
        gradients = unit.gradients
        if gradients.slot is None and gradients.reduce_bytes:
            if gradients.own_slot is None and not self._reduces:
                self.slots.give_own(unit)
            gradients.open(self._claim(gradients.own_slot or self._free_slot(self.slots.shared, unit), unit))

    def add(self, unit: Unit, key: Key, grad: Tensor) -> None:
        """Take a gradient of this rank's."""
        if torch.is_grad_enabled():
            fqn = unit.groups[key[0]].fqns[key[1]]
            raise UsageError(
                f"backward(create_graph=True) reached {fqn!r}: a reduced gradient cannot be differentiated again. "
                "Use torch.autograd.grad over sw.unsharded(model) for second derivatives"
            )
        unit.gradients.add(key, grad, self._scaled)
        self._collectives.advance()

    def add_penalty(self, unit: Unit, key: Key, piece: Tensor) -> None:
        """Take a penalty's gradient: this rank's piece of the mean over its shard group. Every rank must call this."""
        replicate = self._mesh.replicate
        if self._mesh.world_size > 1:
            self._control.note(self._control.reduce_label(unit.index))
        piece = piece.detach().clone()
        if replicate.world_size > 1:
            replicate.all_reduce(piece, label=self._control.reduce_label(unit.index)).wait()
            piece.div_(replicate.world_size)
        unit.gradients.add_penalty(key, piece)

    def reduce(self, unit: Unit) -> None:
        """Start reducing the unit's slot, if it has one; missing gradients count as zeros. It is waited for when the
        slot is wanted again or backward ends. `no_sync` leaves everything in the slot."""
        self._scaled.flush()
        if unit.gradients.slot is not None and self._reduces:
            if self.steps.are_taken:
                for flight in self._in_flight:  # slots are freed as ever, so that units are reduced in the same parts
                    self._sum(flight)
                self.steps.take_early()
                self.steps.note(unit)
            self._start(unit, unit.gradients.complete())

    def finish(self, units: Sequence[Unit]) -> None:
        """Backward is over: agree on the fate of each gradient, reduce late ones and hand out the sums.

        Ranks must agree although this one used every parameter: another may not have, and no rank knows of the others.
        """
        self._scaled.flush()
        if not self._reduces:
            if not all(unit.keeps_params for unit in units):
                # Else nothing was issued, and ranks may well do different numbers of such backwards.
                self._control.agree(Moment.BACKWARD_END)
            for unit in units:
                unit.gradients.show_waiting()
            return
        self.steps.close()
        own = b"".join(unit.gradients.fates() for unit in units)
        agreed = iter(self._control.agree(Moment.BACKWARD_END, own))
        of_units = [list(islice(agreed, len(unit.gradients.keys))) for unit in units]
        for unit, fates in zip(units, of_units, strict=True):
            if Fate.WAITS in fates:  # on any rank, so all of them reduce, in unit order
                self.open(unit)
                self.reduce(unit)
            else:
                unit.gradients.close()
        self._finish_all()
        for unit in units:
            unit.gradients.add_penalties()
        with hooks_run():
            for unit, fates in zip(units, of_units, strict=True):
                unit.gradients.hand_out(fates)
                self.steps.step(unit, fates)
        self.steps.end()

    def abandon(self, units: Sequence[Unit]) -> None:
        """Backward raised: finish the reductions that peers may be waiting for and forget the rest."""
        self._scaled.flush()  # while the slots are still those units'
        self._finish_all()
        for unit in units:
            unit.gradients.abandon()
        self.steps.abandon(units)

    # Slots ------------------------------------------------------------------------------------------------------

    def _claim(self, slot: Slot[Unit], unit: Unit) -> Slot[Unit]:
        for flight in [flight for flight in self._in_flight if flight.slot is slot]:
            self._finish(flight)
        slot.take(unit)
        return slot

    def _free_slot(self, arena: Arena[Unit] | None, unit: Unit) -> Slot[Unit]:
        assert arena is not None
        choices = arena.choices(unit)
        while True:
            for slot in choices:
                if slot.holder is None:
                    return slot
            oldest = next((flight for flight in self._in_flight if flight.slot in choices), None)
            if oldest is not None:
                self._finish(oldest)
            else:  # units whose gradients are still incomplete hold them all: reduce the first one's in part
                victim = choices[0].holder
                assert victim is not None
                self.reduce(victim)

    # Reductions -------------------------------------------------------------------------------------------------

    def _start(self, unit: Unit, slot: Slot[Unit]) -> None:
        """Sum in the shard group, and behind that over replicas. Neither is waited for."""
        assert slot.holder is unit, f"unit {unit.fqn!r} reduces a slot that is not its own"
        groups = [group for group in unit.groups if group.trainable]
        shard, replicate = self._mesh.shard, self._mesh.replicate
        label = self._control.reduce_label(unit.index)
        if self._mesh.world_size > 1:
            self._control.note(label)
        scattered: Work = FINISHED
        if shard.world_size > 1 or replicate.world_size == 1:
            sums = None if self.slots.slices is None else self._claim(self._free_slot(self.slots.slices, unit), unit)
            reductions = tuple(self._reduction(group, slot, sums) for group in groups)
            scattered = shard.reduce_scatter(slot.buffer, reductions, label)
            self._in_flight.append(_InFlight(unit, slot, [scattered]))
            slot = sums or slot
        if replicate.world_size > 1:
            slices = [group.slice_in(slot) for group in groups]
            works = [replicate.all_reduce(own, after=scattered, label=label) for own in slices]
            self._in_flight.append(_InFlight(unit, slot, works, slices))

    def _reduction(self, group: Group, slot: Slot[Unit], sums: Slot[Unit] | None) -> Reduction:
        if sums is not None:
            return Reduction(group.flat_gradients(slot), group.slice_in(sums), accumulate=False)
        return Reduction(
            group.flat_gradients(slot), *group.prepare_sum(), scale=self._scaled.scale_of_sum(group.dtypes.reduce)
        )

    def _finish_all(self) -> None:
        while self._in_flight:
            self._finish(self._in_flight[0])

    def _finish(self, flight: _InFlight) -> None:
        # In order within a unit: the first sum of a backward overwrites the shard's gradient, later ones add to it.
        for earlier in list(self._in_flight):
            if earlier is flight:
                break
            if earlier.unit is flight.unit:
                self._complete(earlier)
        self._complete(flight)

    def _complete(self, flight: _InFlight) -> None:
        self._in_flight.remove(flight)
        self._sum(flight)
        assert flight.slot.holder is flight.unit, f"a reduction of unit {flight.unit.fqn!r} lost its slot"
        flight.slot.free()

    def _sum(self, flight: _InFlight) -> None:
        """Have the sums in the shard's gradient; of one unit in the order in which they were begun."""
        for work in () if flight.is_summed else flight.works:
            work.wait()
        if flight.slices and not flight.is_summed:
            groups = [group for group in flight.unit.groups if group.trainable]
            for group, own in zip(groups, flight.slices, strict=True):
                total, accumulate = group.prepare_sum()
                self._scaled.settle(total, own, accumulate)
        flight.is_summed = True

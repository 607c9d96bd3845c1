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

from shardwise.comm.protocol import FINISHED, BufferKind, Reduction, Work
from shardwise.comm.summation import BatchedAddition, ScaledAddition
from shardwise.engine.control import Control, Moment
from shardwise.engine.mesh import Mesh
from shardwise.engine.units.arena import Arena, Slot, size_classes
from shardwise.engine.units.gradients import Fate, Key
from shardwise.engine.units.group import Group
from shardwise.engine.units.unit import Unit
from shardwise.errors import UsageError
from shardwise.sharded.penalties import hooks_run

REDUCE_SLOTS = 2
"""One unit collects gradients while the one before is being reduced."""
SLICE_SLOTS = 2
"""Of the units reduced last, this rank's slices are being summed over replicas while two more units run backward."""


@dataclass(slots=True, eq=False)
class _InFlight:
    """Sums under way and the slot that is theirs until they are there."""

    unit: Unit
    slot: Slot[Unit]
    works: Sequence[Work]
    slices: Sequence[Tensor] = ()
    """By trainable group: this rank's sum over all replicas, still to be added to the shard's gradient."""


class Reducer:
    """Reduce slots and reductions of one engine. Everything here happens in graph order, alike on every rank."""

    def __init__(self, mesh: Mesh, control: Control, keeps_full: bool) -> None:
        """`keeps_full`: every unit has a full-size gradient buffer of its own (ZeRO-1)."""
        self._mesh = mesh
        self._control = control
        self._keeps_full = keeps_full
        # Replicas exchange straight out of the slots when nothing is scattered before.
        self._collectives = mesh.replicate if mesh.shard.world_size == 1 else mesh.shard
        addition = BatchedAddition if self._collectives.on_streams else ScaledAddition
        self._scaled = addition(1.0 / mesh.world_size)
        self._arena: Arena[Unit] | None = None
        self._slices: Arena[Unit] | None = None
        """Where slices are summed over replicas after they were summed in the shard group, so that their reduce slot
        is free again: shared with the replicas, as the reduce slot is with the shard group."""
        self._largest: dict[Unit, int] = {}
        """Bytes in a reduce slot that each unit has asked for so far, at most."""
        self._own: dict[Unit, Slot[Unit]] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._reduces = True
        """Off in `no_sync`."""

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Backwards inside accumulate; the first one outside reduces the sum."""
        before, self._reduces = self._reduces, False
        try:
            yield
        finally:
            self._reduces = before

    @property
    def total_bytes(self) -> int:
        """Reduce slots, allocated."""
        return sum(slot.buffer.bytes.numel() for slot in self.slots)

    @property
    def slots(self) -> list[Slot[Unit]]:
        """Every reduce slot: the shared ones and those of one unit each."""
        shared = [slot for arena in (self._arena, self._slices) if arena is not None for slot in arena.slots]
        return [*shared, *self._own.values()]

    @property
    def scratch_bytes(self) -> int:
        """Memory for sums of different dtypes."""
        return self._scaled.scratch_bytes

    def allocate(self, units: Sequence[Unit], nesting: int) -> None:
        """Allocate reduce slots and gradient shards for the parameters that are trainable now."""
        for unit in units:
            self._follow_trainable(unit)
        if self._keeps_full:
            for unit in units:
                if unit.gradients.reduce_bytes and unit.gradients.own_slot is None:
                    self._give_own_slot(unit)
        else:
            self._allocate_arena(units, nesting)

    def _allocate_arena(self, units: Sequence[Unit], nesting: int) -> None:
        """Slots for the most that each unit has had to reduce, so that freezing and thawing in turn (a GAN's two
        halves) goes on in the slots that are there."""
        largest = {unit: max(unit.gradients.reduce_bytes, self._largest.get(unit, 0)) for unit in units}
        if self._arena is None or largest != self._largest:
            classes = size_classes(list(largest.items()), lambda _: REDUCE_SLOTS + nesting)
            self._arena = Arena(self._collectives, BufferKind.REDUCE, classes)
            shards = self._mesh.shard.world_size
            if shards > 1 and self._mesh.replicate.world_size > 1:
                classes = size_classes([(unit, n // shards) for unit, n in largest.items()], lambda _: SLICE_SLOTS)
                self._slices = Arena(self._mesh.replicate, BufferKind.REDUCE, classes)
        self._largest = largest

    def _follow_trainable(self, unit: Unit) -> None:
        """Lay out the groups that are trainable now. A slot of the unit's own that has become too small is given up."""
        gradients = unit.gradients
        if gradients.forget_dropped():
            raise UsageError(
                f"requires_grad in unit {unit.fqn!r} changed while gradients of a sw.no_sync backward wait "
                "to be reduced: run a backward outside sw.no_sync first"
            )
        gradients.close()  # it may be collecting what zero_grad() has dropped since
        gradients.place()
        for group in unit.groups:
            group.allocate_gradients()
        own = gradients.own_slot
        if own is not None and own.buffer.bytes.numel() < gradients.reduce_bytes:
            gradients.keep(None)
            del self._own[unit]

    def open(self, unit: Unit) -> None:
        """Give the unit a slot for its gradients. Called in graph order, never because a gradient came: all ranks take
        slots in one order, whichever gradients come to them."""
        gradients = unit.gradients
        if gradients.slot is None and gradients.reduce_bytes:
            if gradients.own_slot is None and not self._reduces:
                self._give_own_slot(unit)
            gradients.open(self._claim(gradients.own_slot or self._free_slot(self._arena, unit), unit))

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

    def abandon(self, units: Sequence[Unit]) -> None:
        """Backward raised: finish the reductions that peers may be waiting for and forget the rest."""
        self._scaled.flush()  # while the slots are still those units'
        self._finish_all()
        for unit in units:
            unit.gradients.abandon()

    # Slots ------------------------------------------------------------------------------------------------------

    def _claim(self, slot: Slot[Unit], unit: Unit) -> Slot[Unit]:
        for flight in [flight for flight in self._in_flight if flight.slot is slot]:
            self._finish(flight)
        slot.take(unit)
        return slot

    def _give_own_slot(self, unit: Unit) -> None:
        buffer = self._collectives.allocate(unit.gradients.reduce_bytes, BufferKind.REDUCE)
        slot = self._own[unit] = Slot[Unit](self._collectives, buffer)
        unit.gradients.keep(slot)

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
            sums = None if self._slices is None else self._claim(self._free_slot(self._slices, unit), unit)
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
        for work in flight.works:
            work.wait()
        if flight.slices:
            groups = [group for group in flight.unit.groups if group.trainable]
            for group, own in zip(groups, flight.slices, strict=True):
                total, accumulate = group.prepare_sum()
                self._scaled.settle(total, own, accumulate)
        assert flight.slot.holder is flight.unit, f"a reduction of unit {flight.unit.fqn!r} lost its slot"
        flight.slot.free()

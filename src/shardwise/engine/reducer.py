"""Reductions of one model's gradients: which unit collects in which slot, and when its slot is reduced.

When a unit's backward is over its reduce slot is reduced in one collective, whether or not this rank had all its
gradients: another rank may have had the others. A slot is taken when a unit's backward begins and reduced when it ends;
before that, in part, if another unit needs the slot; and once more for late gradients when backward ends. The arrival
of a gradient never causes either: without a slot it waits in memory of its own (`units/gradients.py`). On CPUs sums are
in rank order of values scaled by 1 / world_size, whatever the timing; on a device in the backend's order, scaled then.

A reduce slot is *free* (no holder), *collecting* (its holder's `gradients.slot`: gradients are written) or *reducing*
(a reduction in flight uses it). Why no order of events that the graph allows can lose a gradient:

- Only a free slot is taken. A reduction in it is finished first: a unit's next call takes the unit's own slot again
  while that may still hold the sum of the call before.
- Only `_start` moves a slot from collecting to reducing, and after that only `InFlight` frees it, when its sum has been
  added to the shard's gradient. Nobody else waits for a reduction.
- Reductions of one unit are finished in the order in which they were started: the first of a backward overwrites the
  shard's gradient and later ones add to it.
- A gradient that arrives while its unit has no slot joins the next slot that the unit has; if any rank still holds
  one when backward ends, all ranks reduce that unit then.
- `no_sync` and a backward that raised leave slots collecting: the next backward continues in them, or `abandon` frees
  them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from shardwise.comm.protocol import FINISHED, Reduction, Work
from shardwise.comm.summation import BatchedAddition, ScaledAddition
from shardwise.engine.apart_reductions import lies_apart, start_apart
from shardwise.engine.backward_steps import BackwardSteps
from shardwise.engine.collective_log import CollectiveLog, SyncPoint
from shardwise.engine.in_flight import Flight, InFlight
from shardwise.engine.mesh import Mesh
from shardwise.engine.reduce_slots import ReduceSlots
from shardwise.engine.units.arena import Arena, Slot
from shardwise.engine.units.gradients import MEAN, Fate, Key, Reducing
from shardwise.engine.units.group import Group
from shardwise.engine.units.unit import Unit
from shardwise.errors import UsageError
from shardwise.sharded.in_backward import hooks_run


class Reducer:
    """Reduce slots and reductions of one engine. Everything here happens in graph order, alike on every rank."""

    def __init__(self, mesh: Mesh, log: CollectiveLog, keeps_full: bool) -> None:
        """`keeps_full`: every unit has a full-size gradient buffer of its own (ZeRO-1)."""
        self._mesh = mesh
        self._log = log
        # In a shard group of one rank nothing is scattered: replicas reduce the slots themselves.
        self._collectives = mesh.replicate if mesh.shard.world_size == 1 else mesh.shard
        self._additions: dict[float, ScaledAddition] = {}
        """By the divisor of the sum."""
        self.slots = ReduceSlots(mesh, self._collectives, keeps_full)
        self.in_flight = InFlight()
        self.steps = BackwardSteps(log)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory for sums of different dtypes."""
        return sum(scaled.scratch_bytes for scaled in self._additions.values())

    def allocate(self, units: Sequence[Unit], nesting: int) -> None:
        """Allocate what the reductions of currently trainable parameters need. Every rank must call this."""
        self.slots.allocate(units, nesting)
        for unit in units:
            self.reduce_as(unit, unit.gradients.reducing)

    def reduce_as(self, unit: Unit, reducing: Reducing) -> None:
        """Set what reductions make of the unit's gradients from now on. Every rank must do so alike, outside backward.

        Raises UsageError if optimizers step in backward and the unit's gradients would wait for a later backward.
        """
        if self.steps.are_taken and not (reducing.now and reducing.over_replicas):
            self.steps.refuse("sw.no_sync", "each backward takes a step, so gradients of several are never added")
        divisor = reducing.divisor or float(self._mesh.world_size)
        addition = BatchedAddition if self._collectives.on_streams else ScaledAddition
        self._additions.setdefault(divisor, addition(1.0 / divisor))
        unit.gradients.reduce_as(reducing, self._additions[divisor])

    def open(self, unit: Unit) -> None:
        """Give the unit a slot for its gradients. Called in graph order, never because a gradient arrived: all ranks
        take slots in the same order, whichever gradients they have."""
        gradients = unit.gradients
        if gradients.slot is None and gradients.reduce_bytes:
            if gradients.own_slot is None and not gradients.reducing.now:
                self.slots.give_own(unit)
            gradients.open(self._claim(gradients.own_slot or self._free_slot(self.slots.shared, unit), unit))

    def add(self, unit: Unit, key: Key, grad: Tensor) -> None:
        """Collect one of this rank's gradients."""
        if torch.is_grad_enabled():
            fqn = unit.groups[key[0]].fqns[key[1]]
            raise UsageError(
                f"backward(create_graph=True) reached {fqn!r}: a reduced gradient cannot be differentiated again. "
                "Use torch.autograd.grad over sw.unsharded(model) for second derivatives"
            )
        unit.gradients.add(key, grad)
        self._collectives.advance()

    def reduce(self, unit: Unit) -> None:
        """Start to reduce the unit's slot, if it has one; missing gradients count as zeros. The reduction is waited for
        when the slot is needed again or backward ends. `no_sync` leaves everything in the slot."""
        gradients = unit.gradients
        gradients.scaled.flush()
        if gradients.slot is not None and gradients.reducing.now:
            if self.steps.are_taken:
                self.in_flight.sum_all()
                self.steps.take_early()
                self.steps.note(unit)
            self._start(unit, gradients.complete())

    def finish(self, units: Sequence[Unit]) -> None:
        """End a backward: agree on the fate of each gradient, reduce late ones and hand out the sums.

        Ranks must agree even if this one used every parameter: another may not have, and no rank knows of the others.
        """
        self._flush()
        reduced = [unit for unit in units if unit.gradients.reducing.now and unit.gradients.keys]
        for unit in units:
            if not unit.gradients.reducing.now:
                unit.gradients.show_waiting()
        if not reduced:
            if not all(unit.keeps_params for unit in units):
                # Else nothing was issued, and ranks may run different numbers of such backwards.
                self._log.agree(SyncPoint.BACKWARD_END)
            return
        self._finish_reduced(reduced)

    def _finish_reduced(self, units: Sequence[Unit]) -> None:
        self.steps.close()
        own = b"".join(unit.gradients.fates() for unit in units)
        agreed = iter(self._log.agree(SyncPoint.BACKWARD_END, own))
        of_units = [list(islice(agreed, len(unit.gradients.keys))) for unit in units]
        for unit, fates in zip(units, of_units, strict=True):
            if Fate.WAITS in fates:  # on any rank, so all of them reduce, in unit order
                self.open(unit)
                self.reduce(unit)
            else:
                unit.gradients.close()
        self.in_flight.finish_all()
        with hooks_run():
            for unit, fates in zip(units, of_units, strict=True):
                if unit.gradients.apart is not None and unit.gradients.apart.is_waiting:
                    unit.gradients.keep_apart(fates)
                else:
                    unit.gradients.hand_out(fates)
                    self.steps.step(unit, fates)
        self.steps.end()

    def abandon(self, units: Sequence[Unit]) -> None:
        """After a backward that raised, finish the reductions that peers may be waiting for and forget the rest."""
        self._flush()  # while the slots are still those units'
        self.in_flight.finish_all()
        for unit in units:
            unit.gradients.abandon()
        for slot in self.slots.all:
            slot.free()
        self.steps.abandon(units)

    def _flush(self) -> None:
        for scaled in self._additions.values():
            scaled.flush()

    # Slots ------------------------------------------------------------------------------------------------------

    def _claim(self, slot: Slot[Unit], unit: Unit) -> Slot[Unit]:
        if slot.holder is not None:  # the unit's own slot, still used by its last reduction
            self.in_flight.finish_in(slot)
        slot.take(unit)
        return slot

    def _free_slot(self, arena: Arena[Unit] | None, unit: Unit) -> Slot[Unit]:
        assert arena is not None
        choices = arena.choices(unit)
        while True:
            for slot in choices:
                if slot.holder is None:
                    return slot
            if not self.in_flight.finish_oldest(choices):
                # Units whose gradients are still incomplete hold all slots: reduce what the first one has so far.
                victim = choices[0].holder
                assert victim is not None
                assert victim.gradients.slot is not None, "a reduce slot is lost"
                self.reduce(victim)

    # Reductions -------------------------------------------------------------------------------------------------

    def _start(self, unit: Unit, slot: Slot[Unit]) -> None:
        """Start to sum in the shard group and, after that, over replicas. Waits for neither."""
        assert slot.holder is unit, f"{unit} reduces a slot that is not its own"
        groups = [group for group in unit.groups if group.trainable]
        shard, replicate = self._mesh.shard, self._mesh.replicate
        label = self._log.reduce_label(unit.index)
        if self._mesh.world_size > 1:
            self._log.note(label)
        if unit.gradients.reducing is not MEAN and lies_apart(unit, self._mesh):
            start_apart(unit, slot, label, self._mesh, self.in_flight)
            return
        scattered: Work = FINISHED
        if shard.world_size > 1 or replicate.world_size == 1:
            sums = None if self.slots.slices is None else self._claim(self._free_slot(self.slots.slices, unit), unit)
            if sums is None:
                self.in_flight.make_room(unit)
            reductions = tuple(self._reduction(unit, group, slot, sums) for group in groups)
            scattered = shard.reduce_scatter(slot.buffer, reductions, label)
            self.in_flight.append(Flight(unit, slot, [scattered]))
            slot = sums or slot
        if replicate.world_size > 1:
            slices = [group.slice_in(slot) for group in groups]
            works = [replicate.all_reduce(own, after=scattered, label=label) for own in slices]
            self.in_flight.append(Flight(unit, slot, works, slices))

    def _reduction(self, unit: Unit, group: Group, slot: Slot[Unit], sums: Slot[Unit] | None) -> Reduction:
        if sums is not None:
            return Reduction(group.flat_gradients(slot), group.slice_in(sums), accumulate=False)
        scale = unit.gradients.scaled.scale_of_sum(group.dtypes.reduce)
        return Reduction(group.flat_gradients(slot), *group.gradients.prepare_sum(), scale=scale)

"""Reductions of one model's gradients: which unit collects in which slot, and when its slot is reduced.

When a unit's backward is over its reduce slot is reduced in one collective, whether or not this rank had all its
gradients: another rank may have had the others. A slot is taken when a unit's backward begins and reduced when it ends;
before that, in part, if another unit needs the slot; and once more for late gradients when backward ends. The arrival
of a gradient never causes either: without a slot it waits in memory of its own (`gradients.py`). On CPUs sums are
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
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from shardwise.errors import UsageError
from shardwise.fsdp.collectives import BufferKind, Reduction, Work
from shardwise.fsdp.gradients import BatchedAddition, GradientStatus, Key, ScaledAddition
from shardwise.fsdp.mesh import Agreement, Mesh
from shardwise.fsdp.parameter_group import Group
from shardwise.fsdp.slots import Arena, Slot, size_classes
from shardwise.fsdp.unit import Unit, by_mesh

# Reductions under way -------------------------------------------------------------------------------------------------


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
    """The reductions of one reducer that are under way, and the work left to do when one is over. Those of one unit are
    finished in their order: the first of a backward overwrites the shard's gradient and later ones add to it."""

    def finish_all(self) -> None:
        """Wait for every flight and free its slot."""
        while self:
            self._complete(self[0])

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
        self.wait_for_sum(flight)
        if flight.slot is not None:
            assert flight.slot.holder is flight.unit, f"a reduction of {flight.unit} lost its slot"
            flight.slot.free()

    def wait_for_sum(self, flight: Flight) -> None:
        """Wait until the sums are in the shard's gradient, or where else they are written to. The flight keeps its
        slot. Flights of one unit must come here in their order."""
        if not flight.is_summed:
            self._add(flight)

    def _add(self, flight: Flight) -> None:
        for work in flight.works:
            work.wait()
        if flight.slices:
            groups = [group for group in flight.unit.groups if group.trainable]
            for group, own in zip(groups, flight.slices, strict=True):
                self.settle(flight.unit, group, own)
        flight.is_summed = True

    def settle(self, unit: Unit, group: Group, summed: Tensor) -> None:
        """Add this rank's slice of a sum to the shard's gradient, or overwrite that."""
        total, accumulate = group.gradients.prepare_sum()
        unit.gradients.scaled.settle(total, summed, accumulate)


# Reduce slots ---------------------------------------------------------------------------------------------------------

# The `Reducer` decides which unit holds which slot, and when.

REDUCE_SLOTS = 2
"""Slots of a size class, besides one for each level of nesting: one unit collects gradients while the one before it is
being reduced."""


class ReduceSlots:
    """Reduce slots shared by a size class. Every rank allocates and releases them alike."""

    def __init__(self) -> None:
        self.allocates_gradients = True
        """Whether gradient shards are allocated with the slots; else when the first sum is added to them."""
        self.shared: Arena[Unit] | None = None
        self._largest: dict[Unit, int] = {}
        """The most bytes of a reduce slot that each unit has needed so far."""

    @property
    def all(self) -> list[Slot[Unit]]:
        """Every reduce slot."""
        return [] if self.shared is None else [*self.shared.slots]

    def allocate(self, units: Sequence[Unit], nesting: int) -> None:
        """Allocate reduce slots and gradient shards for the parameters that are trainable now."""
        for unit in units:
            self._follow_trainable(unit)
        self._allocate_slots(units, nesting)

    def _allocate_slots(self, units: Sequence[Unit], nesting: int) -> None:
        """Allocate shared slots for the most that each unit has had to reduce so far, so that freezing and unfreezing
        in turn (a GAN's two halves) reuses the slots."""
        largest = {unit: max(unit.gradients.reduce_bytes, self._largest.get(unit, 0)) for unit in units}
        if self.shared is None or largest != self._largest:
            self._drop_shared()
            self._allocate_shared(largest, nesting)
        self._largest = largest

    def _allocate_shared(self, largest: Mapping[Unit, int], nesting: int) -> None:
        self.shared = Arena(BufferKind.REDUCE)
        for mesh, members in by_mesh(largest).items():
            needed = [(unit, largest[unit]) for unit in members]
            self.shared.allocate(mesh.reducing, size_classes(needed, lambda _: REDUCE_SLOTS + nesting))

    def _follow_trainable(self, unit: Unit) -> None:
        """Lay out the gradients of the groups that are trainable now."""
        gradients = unit.gradients
        gradients.close()  # it may still hold gradients that the user has dropped
        gradients.place()
        for group in unit.groups:
            if self.allocates_gradients and group.trainable:
                group.gradients.allocate()

    def _drop_shared(self) -> None:
        for slot in () if self.shared is None else self.shared.slots:
            slot.collectives.drop(slot.buffer)
        self.shared = None


# The reducer ----------------------------------------------------------------------------------------------------------

REDUCER = "reducer"
"""Functions that are asked first for the class of a model's `Reducer`: (mesh, strategy) -> type[Reducer] | None."""


class Reducer:
    """Reduce slots and reductions of one engine. Everything here happens in graph order, alike on every rank."""

    def __init__(self, mesh: Mesh, log: Agreement) -> None:
        self.mesh = mesh
        self.log = log
        addition = BatchedAddition if mesh.reducing.on_streams else ScaledAddition
        self.mean: ScaledAddition = addition(1.0 / mesh.world_size)
        """Adds gradients to those in a slot, so that their sum over ranks is the mean."""
        self.slots = ReduceSlots()
        self.in_flight = InFlight()

    def allocate(self, units: Sequence[Unit], nesting: int) -> None:
        """Allocate what the reductions of currently trainable parameters need. Every rank must call this."""
        self.slots.allocate(units, nesting)
        for unit in units:
            unit.gradients.scaled = self.mean

    def open(self, unit: Unit) -> None:
        """Give the unit a slot for its gradients. Called in graph order, never because a gradient arrived: all ranks
        take slots in the same order, whichever gradients they have."""
        gradients = unit.gradients
        if gradients.slot is None and gradients.reduce_bytes:
            gradients.open(self.claim(self.find_slot(self.slots.shared, unit), unit))

    def add(self, unit: Unit, key: Key, grad: Tensor) -> None:
        """Collect one of this rank's gradients."""
        if torch.is_grad_enabled():
            fqn = unit.groups[key[0]].fqns[key[1]]
            raise UsageError(
                f"backward(create_graph=True) reached {fqn!r}: a reduced gradient cannot be differentiated again. "
                "Use torch.autograd.grad over sw.unsharded(model) for second derivatives"
            )
        unit.gradients.add(key, grad)
        unit.mesh.reducing.advance()

    def reduce(self, unit: Unit) -> None:
        """Start to reduce the unit's slot, if it has one; missing gradients count as zeros. The reduction is waited for
        when the slot is needed again or backward ends."""
        gradients = unit.gradients
        gradients.scaled.flush()
        if gradients.slot is not None:
            self._start(unit, gradients.complete())

    def finish(self, units: Sequence[Unit]) -> None:
        """End a backward: agree on the status of each gradient, reduce late ones and write the sums to `.grad`.

        Ranks must agree even if this one used every parameter: another may not have, and no rank knows of the others.
        """
        self.flush()
        units = [unit for unit in units if unit.gradients.keys]
        own = b"".join(map(self.statuses_of, units))
        agreed = iter(self.log.greatest(own))
        of_units = [list(islice(agreed, len(unit.gradients.keys))) for unit in units]
        for unit, statuses in zip(units, of_units, strict=True):
            if GradientStatus.WAITS in statuses:  # on any rank, so all of them reduce, in unit order
                self.open(unit)
                self.reduce(unit)
            else:
                unit.gradients.close()
        self.in_flight.finish_all()
        self._write_grads(units, of_units)

    def statuses_of(self, unit: Unit) -> bytes:
        """Return the status of each of the unit's gradients on this rank."""
        return unit.gradients.statuses()

    def _write_grads(self, units: Sequence[Unit], of_units: Sequence[Sequence[int]]) -> None:
        """Write the units' gradients to `.grad`, given the statuses that ranks agreed on."""
        for unit, statuses in zip(units, of_units, strict=True):
            unit.gradients.write_grads(statuses)

    def flush(self) -> None:
        """Copy all gradients that have arrived to their slots."""
        self.mean.flush()

    # Slots ------------------------------------------------------------------------------------------------------

    def claim(self, slot: Slot[Unit], unit: Unit) -> Slot[Unit]:
        """Give the slot to the unit. A reduction of the unit that still uses it is finished first."""
        if slot.holder is not None:
            self.in_flight.finish_in(slot)
        slot.take(unit)
        return slot

    def find_slot(self, arena: Arena[Unit] | None, unit: Unit) -> Slot[Unit]:
        """Return a free slot of the arena that the unit may hold."""
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
        """Start to sum the unit's slot over all ranks. Waits for none."""
        assert slot.holder is unit, f"{unit} reduces a slot that is not its own"
        label = self.log.reduce_label(unit.index)
        if self.mesh.world_size > 1:
            self.log.note(label)
        self.start_sum(unit, slot, label)

    def start_sum(self, unit: Unit, slot: Slot[Unit], label: int) -> None:
        """Start to sum the slot into the shard's gradient."""
        groups, mesh = [group for group in unit.groups if group.trainable], unit.mesh
        if mesh.replicate.world_size == 1:
            scaled = unit.gradients.scaled
            reductions = tuple(
                Reduction(
                    group.flat_gradients(slot),
                    *group.gradients.prepare_sum(),
                    scale=scaled.scale_of_sum(group.dtypes.reduce),
                )
                for group in groups
            )
            work = mesh.shard.reduce_scatter(slot.buffer, reductions, label)
            self.in_flight.append(Flight(unit, slot, [work]))
        else:  # nothing is sharded: the slot itself is summed over the replicas
            slices = [group.slice_in(slot) for group in groups]
            works = [mesh.replicate.all_reduce(own, label=label) for own in slices]
            self.in_flight.append(Flight(unit, slot, works, slices))

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
- A backward that raised leaves slots collecting, and `abandon` frees them. (So does a custom reduction that is not due:
  the next backward continues in them.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from shardwise.errors import UsageError
from shardwise.fsdp.buffers import BatchedAddition, ScaledAddition
from shardwise.fsdp.collective_log import CollectiveLog, SyncPoint
from shardwise.fsdp.collectives import BufferKind, Collectives, Reduction, Work
from shardwise.fsdp.gradients import GradientStatus, Key
from shardwise.fsdp.mesh import Mesh
from shardwise.fsdp.sharded_parameter import hooks_run
from shardwise.fsdp.slots import Arena, Slot, size_classes
from shardwise.fsdp.strategy import Strategy
from shardwise.fsdp.unit import Unit
from shardwise.registry import registered

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
        self.wait_for_sum(flight)
        if flight.slot is not None:
            assert flight.slot.holder is flight.unit, f"a reduction of {flight.unit} lost its slot"
            flight.slot.free()

    def wait_for_sum(self, flight: Flight) -> None:
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


# Reduce slots ---------------------------------------------------------------------------------------------------------

# The `Reducer` decides which unit holds which slot, and when.

REDUCE_SLOTS = 2
"""Slots of a size class, besides one for each level of nesting: one unit collects gradients while the one before it is
being reduced."""


class ReduceSlots:
    """Reduce slots shared by a size class, and reduce slots of one unit alone. Every rank allocates and releases them
    alike."""

    def __init__(self, collectives: Collectives) -> None:
        """`collectives`: those that reduce gradients first."""
        self._collectives = collectives
        self.allocates_gradients = True
        """Whether gradient shards are allocated with the slots; else when the first sum is added to them."""
        self.shared: Arena[Unit] | None = None
        self.own: dict[Unit, Slot[Unit]] = {}
        """Slots of one unit alone, in which it collects its gradients instead of a shared one."""
        self._largest: dict[Unit, int] = {}
        """The most bytes of a reduce slot that each unit has needed so far."""

    @property
    def all(self) -> list[Slot[Unit]]:
        """Every reduce slot."""
        return [*(() if self.shared is None else self.shared.slots), *self.own.values()]

    @property
    def total_bytes(self) -> int:
        """Bytes of all reduce slots."""
        return sum(slot.buffer.bytes.numel() for slot in self.all)

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
        classes = size_classes(list(largest.items()), lambda _: REDUCE_SLOTS + nesting)
        self.shared = Arena(self._collectives, BufferKind.REDUCE, classes)

    def _follow_trainable(self, unit: Unit) -> None:
        """Lay out the gradients of the groups that are trainable now. Drops the unit's own slot if it is too small."""
        gradients = unit.gradients
        gradients.close()  # it may still hold gradients that the user has dropped
        gradients.place()
        for group in unit.groups:
            if self.allocates_gradients and group.trainable:
                group.gradients.allocate()
        own = self.own.get(unit)
        if own is not None and own.buffer.bytes.numel() < gradients.reduce_bytes:
            own.collectives.drop(self.own.pop(unit).buffer)

    def give_own(self, unit: Unit) -> None:
        """Allocate a reduce slot for this unit alone, if it has none."""
        if unit not in self.own:
            buffer = self._collectives.allocate(unit.gradients.reduce_bytes, BufferKind.REDUCE)
            self.own[unit] = Slot[Unit](self._collectives, buffer)

    def release(self, units: Sequence[Unit]) -> None:
        """Free the memory of every slot, and of the gradient shards of groups without a gradient; `allocate` may be
        called again. Only between steps."""
        self._drop_shared()
        for slot in self.own.values():
            slot.collectives.drop(slot.buffer)
        self.own.clear()
        self._largest.clear()
        for unit in units:
            unit.gradients.forget_slots()
            for group in unit.groups:
                group.gradients.release()

    def _drop_shared(self) -> None:
        for slot in () if self.shared is None else self.shared.slots:
            slot.collectives.drop(slot.buffer)
        self.shared = None


# The reducer ----------------------------------------------------------------------------------------------------------

SEAM = "reducer"
"""Functions that are asked first for the class of a model's `Reducer`: (mesh, strategy) -> type[Reducer] | None."""


def reducer_for(mesh: Mesh, strategy: Strategy) -> type[Reducer]:
    """Return the class whose object reduces the gradients of a model."""
    found: list[type[Reducer]] = [kind for choose in registered(SEAM) if (kind := choose(mesh, strategy)) is not None]
    return found[0] if found else Reducer


class ReductionObserver(Protocol):
    """What a module outside the core does in the course of a backward's reductions, alike on every rank."""

    def begin_reduction(self, unit: Unit) -> None:
        """Called before a reduction of the unit begins."""

    def end_autograd(self) -> None:
        """Called when autograd is done, before ranks agree on the status of all gradients."""

    def wrote_grads(self, unit: Unit, statuses: Sequence[int]) -> None:
        """Called when the unit's gradients are in `.grad`, with the status of each, in the order of its keys."""

    def end_backward(self) -> None:
        """Called when all gradients are in `.grad`."""

    def abandon(self, units: Sequence[Unit]) -> None:
        """Called after a backward that raised, when all its reductions are over."""


class Reducer:
    """Reduce slots and reductions of one engine. Everything here happens in graph order, alike on every rank."""

    def __init__(self, mesh: Mesh, log: CollectiveLog) -> None:
        self.mesh = mesh
        self.log = log
        # In a shard group of one rank nothing is scattered: replicas reduce the slots themselves.
        self.collectives = mesh.replicate if mesh.shard.world_size == 1 else mesh.shard
        self._additions: dict[float, ScaledAddition] = {}
        """By the divisor of the sum."""
        self.slots = ReduceSlots(self.collectives)
        self.in_flight = InFlight()
        self.observers: list[ReductionObserver] = []

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory for sums of different dtypes."""
        return sum(scaled.scratch_bytes for scaled in self._additions.values())

    def allocate(self, units: Sequence[Unit], nesting: int) -> None:
        """Allocate what the reductions of currently trainable parameters need. Every rank must call this."""
        custom = [unit.gradients.custom for unit in units if unit.gradients.custom is not None]
        for reduction in custom:
            reduction.check_none_waits()
        self.slots.allocate(units, nesting)
        for unit in units:
            unit.gradients.scaled = self.addition(float(self.mesh.world_size))
        for reduction in custom:
            reduction.allocate(self)

    def addition(self, divisor: float) -> ScaledAddition:
        """Return what adds gradients to those in a slot, each divided by `divisor`."""
        if divisor not in self._additions:
            kind = BatchedAddition if self.collectives.on_streams else ScaledAddition
            self._additions[divisor] = kind(1.0 / divisor)
        return self._additions[divisor]

    def open(self, unit: Unit) -> None:
        """Give the unit a slot for its gradients. Called in graph order, never because a gradient arrived: all ranks
        take slots in the same order, whichever gradients they have."""
        gradients = unit.gradients
        if gradients.slot is None and gradients.reduce_bytes:
            if gradients.custom is not None:
                gradients.custom.open()
            own = self.slots.own.get(unit)
            gradients.open(self.claim(own or self.find_slot(self.slots.shared, unit), unit))

    def add(self, unit: Unit, key: Key, grad: Tensor) -> None:
        """Collect one of this rank's gradients."""
        if torch.is_grad_enabled():
            fqn = unit.groups[key[0]].fqns[key[1]]
            raise UsageError(
                f"backward(create_graph=True) reached {fqn!r}: a reduced gradient cannot be differentiated again. "
                "Use torch.autograd.grad over sw.unsharded(model) for second derivatives"
            )
        unit.gradients.add(key, grad)
        self.collectives.advance()

    def begin(self, units: Sequence[Unit]) -> None:
        """Begin a backward. No communication."""
        for unit in units:
            if unit.gradients.custom is not None:
                unit.gradients.custom.begin_backward()

    def reduce(self, unit: Unit) -> None:
        """Start to reduce the unit's slot, if it has one; missing gradients count as zeros. The reduction is waited for
        when the slot is needed again or backward ends. If it is not due, everything stays in the slot."""
        gradients = unit.gradients
        gradients.scaled.flush()
        if gradients.slot is not None and (gradients.custom is None or gradients.custom.is_due):
            for observer in self.observers:
                observer.begin_reduction(unit)
            self._start(unit, gradients.complete())

    def finish(self, units: Sequence[Unit]) -> None:
        """End a backward: agree on the status of each gradient, reduce late ones and write the sums to `.grad`.

        Ranks must agree even if this one used every parameter: another may not have, and no rank knows of the others.
        """
        self._flush()
        reduced = []
        for unit in units:
            custom = unit.gradients.custom
            if custom is not None and not custom.is_due:
                custom.end_backward()
            elif unit.gradients.keys:
                reduced.append(unit)
        if reduced:
            self._finish_reduced(reduced)
        elif any(unit.reshards_after_forward for unit in units):
            # Else nothing was issued, and ranks may run different numbers of such backwards.
            self.log.agree(SyncPoint.BACKWARD_END)

    def _finish_reduced(self, units: Sequence[Unit]) -> None:
        for observer in self.observers:
            observer.end_autograd()
        own = b"".join(unit.gradients.statuses() for unit in units)
        agreed = iter(self.log.agree(SyncPoint.BACKWARD_END, own))
        of_units = [list(islice(agreed, len(unit.gradients.keys))) for unit in units]
        for unit, statuses in zip(units, of_units, strict=True):
            if GradientStatus.WAITS in statuses:  # on any rank, so all of them reduce, in unit order
                self.open(unit)
                self.reduce(unit)
            else:
                unit.gradients.close()
        self.in_flight.finish_all()
        with hooks_run():
            for unit, statuses in zip(units, of_units, strict=True):
                if unit.gradients.custom is not None and unit.gradients.custom.keep(statuses):
                    continue
                unit.gradients.write_grads(statuses)
                for observer in self.observers:
                    observer.wrote_grads(unit, statuses)
        for observer in self.observers:
            observer.end_backward()

    def abandon(self, units: Sequence[Unit]) -> None:
        """After a backward that raised, finish the reductions that peers may be waiting for and forget the rest."""
        self._flush()  # while the slots are still those units'
        self.in_flight.finish_all()
        for unit in units:
            unit.gradients.abandon()
        for slot in self.slots.all:
            slot.free()
        for observer in self.observers:
            observer.abandon(units)

    def _flush(self) -> None:
        for scaled in self._additions.values():
            scaled.flush()

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
        custom = unit.gradients.custom
        if custom is None or not custom.start(slot, label):
            self.start_sum(unit, slot, label)

    def start_sum(self, unit: Unit, slot: Slot[Unit], label: int) -> None:
        """Start to sum the slot into the shard's gradient."""
        groups = [group for group in unit.groups if group.trainable]
        if self.mesh.replicate.world_size == 1:
            self.in_flight.make_room(unit)
            scaled = unit.gradients.scaled
            reductions = tuple(
                Reduction(
                    group.flat_gradients(slot),
                    *group.gradients.prepare_sum(),
                    scale=scaled.scale_of_sum(group.dtypes.reduce),
                )
                for group in groups
            )
            work = self.mesh.shard.reduce_scatter(slot.buffer, reductions, label)
            self.in_flight.append(Flight(unit, slot, [work]))
        else:  # nothing is sharded: the slot itself is summed over the replicas
            slices = [group.slice_in(slot) for group in groups]
            works = [self.mesh.replicate.all_reduce(own, label=label) for own in slices]
            self.in_flight.append(Flight(unit, slot, works, slices))

"""Unsharding of one model's units: which unit gets which slot, when, and which one has to leave it.

Slots are handed out and taken back in the order of the units' calls, which is the same on every rank, so ranks issue
the same all_gathers in the same order.

A slot may be taken from a unit whose forward is not under way, even in the middle of its backward: nothing of the
backward points into the slot. What autograd saved are handles, which have the unit unsharded again, in whatever slot,
when they are needed (`saved_tensors.py`), and gradients are collected elsewhere. A unit in forward keeps its slot:
its modules read the parameters themselves, at any moment.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from shardwise.errors import ConfigError
from shardwise.fsdp.collectives import BufferKind
from shardwise.fsdp.mesh import Agreement, Mesh
from shardwise.fsdp.parameter_group import ParameterState, Slices
from shardwise.fsdp.schedule import Phase, Schedule
from shardwise.fsdp.slots import Arena, Slot, size_classes
from shardwise.fsdp.unit import Unit, by_mesh

_NOT_PREFETCHED = 2
"""Slots left to the unit that computes and to the one before it, whose kernels may still be reading. Prefetching looks
so many events further, since as many of the nearest may be of units that are unsharded already."""


UNSHARDER = "unsharder"
"""Functions that are asked first for the class of a mesh's `Unsharder`: (mesh) -> type[Unsharder] | None."""


class Unsharder:
    """The gather slots of one engine's units. Everything here happens in graph order, alike on every rank."""

    def __init__(self, mesh: Mesh, log: Agreement, schedule: Schedule, slots: int) -> None:
        self._mesh = mesh
        self._log = log
        self._schedule = schedule
        self._slots = slots
        self._arena: Arena[Unit] | None = None
        self._meshes: list[Mesh] = []
        """Those that the units are on."""
        self.slots: dict[int, Slot[Unit]] = {}
        """Every slot by the identity of its storage, those that are shards themselves included."""
        self.retired_slots = 0
        """Number of storages left to holders of views when their unit was resharded."""
        self.own_slots: dict[Unit, Slot[Unit]] = {}
        """Slots of one unit alone, in which it lies while it is held (`Unit.is_held`)."""

    @property
    def all_slots(self) -> list[Slot[Unit]]:
        """Every slot but those that are shards themselves."""
        return [*(() if self._arena is None else self._arena.slots), *self.own_slots.values()]

    def allocate(self, units: Sequence[Unit]) -> None:
        """Allocate every slot, once. Every rank must call this."""
        if self._arena is not None:
            return
        self._arena, by_ranks = Arena(BufferKind.GATHER), by_mesh(units)
        self._meshes = [*by_ranks]
        for mesh, members in by_ranks.items():
            moving = [unit for unit in members if unit.reshards_after_forward]
            kept = [unit for unit in members if not (unit.reshards_after_forward or unit.parameters.is_pinned)]
            classes = [*size_classes(sizes(moving), lambda _: self._slots), *size_classes(sizes(kept), len)]
            self._arena.allocate(mesh.shard, classes)
        pinned = [unit.parameters.pin(unit.mesh.shard, unit) for unit in units if unit.parameters.is_pinned]
        for slot in (*self.all_slots, *pinned):
            self.slots[slot.key] = slot

    def release(self, units: Sequence[Unit]) -> None:
        """Free the memory of every slot; `allocate` may be called again. Every rank must call this."""
        self.reshard_all(units)
        for slot in self.all_slots:
            slot.collectives.drop(slot.buffer)
        self._arena = None
        self.own_slots.clear()
        self.slots.clear()
        for unit in units:
            unit.parameters.forget_slots()

    def begin(self, units: Sequence[Unit]) -> None:
        """Called when an outermost forward begins: have gathers wait for what was enqueued before, which may have
        written shards without increasing their version."""
        if self._mesh.shard.on_streams:
            before = self._mesh.shard.mark()
            for unit in units:
                unit.parameters.wait_for(before)

    def unshard(self, unit: Unit, again: bool) -> None:
        """Unshard `unit` with its present weights and wait for it. `again`: after its forward."""
        parameters = unit.parameters
        if parameters.state is ParameterState.UNSHARDING:
            parameters.wait_for_unshard()
        if parameters.state is ParameterState.UNSHARDED and not parameters.is_fresh:
            self.reshard(unit)  # an optimizer has written the shard since: the slot holds old weights
        if parameters.state is ParameterState.SHARDED:
            own = self.own_slots.get(unit) if unit.is_held else None
            self._start(unit, own or self._free_slot(self._arena_of(unit, again), unit))
            parameters.wait_for_unshard()

    def prefetch(self, units: Sequence[Unit]) -> None:
        """Start to unshard the units that come next in the recorded order, as far as their slots are free."""
        wanted, last = max(1, self._slots - _NOT_PREFETCHED), None
        for event in self._schedule.nearest(wanted + _NOT_PREFETCHED):
            unit = units[event.unit]
            if wanted <= 0 and last not in unit.ancestors:  # units inside the last one are needed with it
                return
            parameters = unit.parameters
            if parameters.state is ParameterState.UNSHARDED and not parameters.is_fresh:  # kept over a step
                self.reshard(unit)
            if parameters.state is ParameterState.SHARDED:
                slot = self._arena_of(unit, event.phase is Phase.BACKWARD).preferred(unit)
                if slot.holder is not None:
                    # Prefetching never evicts, and never skips a unit: all_gathers are issued in the order of need.
                    return
                self._start(unit, slot)
            if parameters.state is ParameterState.UNSHARDING:
                wanted, last = wanted - 1, unit

    def _start(self, unit: Unit, slot: Slot[Unit]) -> None:
        # Load first: a disk may fail, and must do so before anything is issued or taken.
        slices = self._slices_for(unit, slot)
        held = slices.load()
        label = self._log.gather_label(unit.index)
        if slot.collectives.world_size > 1:
            self._log.note(label)
        slot.take(unit)  # waits for the slot's last readers, before this rank's slices are written into it
        unit.parameters.unshard(slot, slices, label)
        del held

    def _arena_of(self, unit: Unit, again: bool) -> Arena[Unit]:
        """Return the slots that the unit may be gathered in. `again`: after its forward."""
        assert self._arena is not None
        return self._arena

    def _slices_for(self, unit: Unit, slot: Slot[Unit]) -> Slices:
        """Return the slices that a gather into the slot starts from."""
        assert unit.parameters.slices is not None
        return unit.parameters.slices

    def _free_slot(self, arena: Arena[Unit], unit: Unit) -> Slot[Unit]:
        """Return a free slot for the unit. If all are held, evict a unit that is not in use, else one in backward."""
        choices = arena.choices(unit)
        for slot in choices:
            if slot.holder is None:
                return slot
        # Units that nothing computes with go first. Handles unshard a unit in backward again, but not one in forward.
        # Both lists are in the order of `choices`, so every rank evicts the same unit.
        held = [(slot, slot.holder) for slot in choices if slot.holder is not None]
        evictable = [pair for pair in held if pair[1].parameters.state is not ParameterState.IN_USE]
        evictable += [pair for pair in held if not pair[1].in_forward]
        if evictable:
            slot, holder = evictable[0]
            self.reshard(holder)
            return slot
        raise ConfigError(
            f"{unit} needs a slot, but all {len(choices)} of its size are held by units whose forward is "
            f"running; raise slots (now {self._slots}) to at least {len(choices) + 1}"
        )

    def reshard(self, unit: Unit) -> None:
        """Take the unit's slot back, whatever state the unit is in."""
        parameters = unit.parameters
        if parameters.state is ParameterState.UNSHARDING:
            parameters.wait_for_unshard()
        if parameters.state is ParameterState.IN_USE:
            parameters.show_sharded()
        if parameters.state is not ParameterState.UNSHARDED or parameters.is_pinned:
            return
        assert parameters.slot is not None
        key = parameters.slot.key
        slot, was_retired = parameters.reshard()
        slot.collectives.release(slot.buffer)  # after its last reader: the slot's next writer waits for this
        slot.free()
        if was_retired:
            self.slots[slot.key] = self.slots.pop(key)
            self.retired_slots += 1
            warnings.warn(
                f"shardwise: something still holds a view of {unit}'s gathered parameters after its forward "
                "or backward; that memory was left to it and the slot replaced. Keep a .clone() instead of the view",
                stacklevel=2,
            )

    def reshard_after_forward(self, unit: Unit, wants_backward: bool) -> None:
        """Take the slot of a unit back whose forward is over. `wants_backward`: its backward will gather it again."""
        self.reshard(unit)

    def settle(self) -> None:
        """Order the current stream after all reads of this rank's slices, so that these may be written."""
        for mesh in self._meshes:
            mesh.shard.settle()

    def reshard_all(self, units: Sequence[Unit]) -> None:
        """Take every slot back, even one that an interrupt left with a holder that does not know of it."""
        for unit in units:
            self.reshard(unit)
        for slot in self.all_slots:
            if slot.holder is not None:
                slot.collectives.release(slot.buffer)
                slot.free()


def sizes(units: Sequence[Unit]) -> list[tuple[Unit, int]]:
    """Return each unit and the bytes that it takes in a slot."""
    return [(unit, unit.parameters.unsharded_bytes) for unit in units]

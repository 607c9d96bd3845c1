"""Memory for gradients on their way: the reduce slots of one engine's units. Which unit has which, and when, is the
`Reducer`'s affair."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.comm.protocol import BufferKind, Collectives
from shardwise.engine.mesh import Mesh
from shardwise.engine.units.arena import Arena, Slot
from shardwise.engine.units.size_classes import size_classes
from shardwise.engine.units.unit import Unit
from shardwise.errors import UsageError

REDUCE_SLOTS = 2
"""One unit collects gradients while the one before is being reduced."""
SLICE_SLOTS = 2
"""Of the units reduced last, this rank's slices are being summed over replicas while two more units run backward."""


class ReduceSlots:
    """Shared ones by size class, and those of one unit each. Every rank allocates and releases them alike."""

    def __init__(self, mesh: Mesh, collectives: Collectives, keeps_full: bool) -> None:
        """`collectives`: what gradients come to first. `keeps_full`: every unit has a slot of its own (ZeRO-1)."""
        self._mesh = mesh
        self._collectives = collectives
        self._keeps_full = keeps_full
        self.keeps_gradients = True
        """Gradient shards are allocated with the slots; else when the first sum comes to them."""
        self.shared: Arena[Unit] | None = None
        self.slices: Arena[Unit] | None = None
        """Where slices are summed over replicas after they were summed in the shard group, so that their reduce slot
        is free again: shared with the replicas, as the reduce slot is with the shard group."""
        self._largest: dict[Unit, int] = {}
        """Bytes in a reduce slot that each unit has asked for so far, at most."""
        self._own: dict[Unit, Slot[Unit]] = {}

    @property
    def all(self) -> list[Slot[Unit]]:
        """Every reduce slot."""
        shared = [slot for arena in (self.shared, self.slices) if arena is not None for slot in arena.slots]
        return [*shared, *self._own.values()]

    @property
    def total_bytes(self) -> int:
        """Allocated."""
        return sum(slot.buffer.bytes.numel() for slot in self.all)

    def allocate(self, units: Sequence[Unit], nesting: int) -> None:
        """Allocate reduce slots and gradient shards for the parameters that are trainable now."""
        for unit in units:
            self._follow_trainable(unit)
        if self._keeps_full:
            for unit in units:
                if unit.gradients.reduce_bytes and unit.gradients.own_slot is None:
                    self.give_own(unit)
        else:
            self._allocate_shared(units, nesting)

    def _allocate_shared(self, units: Sequence[Unit], nesting: int) -> None:
        """Slots for the most that each unit has had to reduce, so that freezing and thawing in turn (a GAN's two
        halves) goes on in the slots that are there."""
        largest = {unit: max(unit.gradients.reduce_bytes, self._largest.get(unit, 0)) for unit in units}
        if self.shared is None or largest != self._largest:
            self._drop_shared()
            classes = size_classes(list(largest.items()), lambda _: REDUCE_SLOTS + nesting)
            self.shared = Arena(self._collectives, BufferKind.REDUCE, classes)
            shards = self._mesh.shard.world_size
            if shards > 1 and self._mesh.replicate.world_size > 1:
                classes = size_classes([(unit, n // shards) for unit, n in largest.items()], lambda _: SLICE_SLOTS)
                self.slices = Arena(self._mesh.replicate, BufferKind.REDUCE, classes)
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
            if self.keeps_gradients and group.trainable:
                group.gradients.allocate()
        own = gradients.own_slot
        if own is not None and own.buffer.bytes.numel() < gradients.reduce_bytes:
            gradients.keep(None)
            own.collectives.drop(self._own.pop(unit).buffer)

    def give_own(self, unit: Unit) -> None:
        """Allocate a slot for this unit alone."""
        buffer = self._collectives.allocate(unit.gradients.reduce_bytes, BufferKind.REDUCE)
        slot = self._own[unit] = Slot[Unit](self._collectives, buffer)
        unit.gradients.keep(slot)

    def release(self, units: Sequence[Unit]) -> None:
        """Give the memory of every slot up, and that of gradients where there are none, until `allocate`. Only between
        steps."""
        self._drop_shared()
        for slot in self._own.values():
            slot.collectives.drop(slot.buffer)
        self._own.clear()
        self._largest.clear()
        for unit in units:
            unit.gradients.forget_slots()
            for group in unit.groups:
                group.gradients.release()

    def _drop_shared(self) -> None:
        for arena in (self.shared, self.slices):
            for slot in () if arena is None else arena.slots:
                slot.collectives.drop(slot.buffer)
        self.shared = self.slices = None

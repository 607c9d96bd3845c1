"""Memory for gradients that are not reduced yet: the reduce slots of one engine's units. The `Reducer` decides which
unit holds which slot, and when."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.comm.protocol import BufferKind, Collectives
from shardwise.engine.mesh import Mesh
from shardwise.engine.units.arena import Arena, Slot, size_classes
from shardwise.engine.units.unit import Unit
from shardwise.errors import UsageError

REDUCE_SLOTS = 2
"""Slots of a size class, besides one for each level of nesting: one unit collects gradients while the one before it is
being reduced."""
SLICE_SLOTS = 2
"""Slice slots of a size class: the slices of two units are summed over replicas while two more units run backward."""


class ReduceSlots:
    """Reduce slots shared by a size class, and reduce slots of one unit alone. Every rank allocates and releases them
    alike."""

    def __init__(self, mesh: Mesh, collectives: Collectives, keeps_full: bool) -> None:
        """`collectives`: those that reduce gradients first. `keeps_full`: every unit has its own slot (ZeRO-1)."""
        self._mesh = mesh
        self._collectives = collectives
        self._keeps_full = keeps_full
        self.keeps_gradients = True
        """Whether gradient shards are allocated with the slots; else when the first sum is added to them."""
        self.shared: Arena[Unit] | None = None
        self.slices: Arena[Unit] | None = None
        """Slice slots: slices that were summed in the shard group are summed over replicas there, so that the reduce
        slot is free again. Allocated on the replicate group, as reduce slots are on the shard group."""
        self._largest: dict[Unit, int] = {}
        """The most bytes of a reduce slot that each unit has needed so far."""
        self._own: dict[Unit, Slot[Unit]] = {}

    @property
    def all(self) -> list[Slot[Unit]]:
        """Every reduce slot."""
        shared = [slot for arena in (self.shared, self.slices) if arena is not None for slot in arena.slots]
        return [*shared, *self._own.values()]

    @property
    def total_bytes(self) -> int:
        """Bytes of all reduce slots."""
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
        """Allocate shared slots for the most that each unit has had to reduce so far, so that freezing and unfreezing
        in turn (a GAN's two halves) reuses the slots."""
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
        """Lay out the gradients of the groups that are trainable now. Drops the unit's own slot if it is too small."""
        gradients = unit.gradients
        if gradients.forget_dropped():
            raise UsageError(
                f"requires_grad in {unit} changed while gradients of a sw.no_sync backward wait "
                "to be reduced: run a backward outside sw.no_sync first"
            )
        gradients.close()  # it may still hold gradients that zero_grad() has dropped
        gradients.place()
        for group in unit.groups:
            if self.keeps_gradients and group.trainable:
                group.gradients.allocate()
        own = gradients.own_slot
        if own is not None and own.buffer.bytes.numel() < gradients.reduce_bytes:
            gradients.keep(None)
            own.collectives.drop(self._own.pop(unit).buffer)

    def give_own(self, unit: Unit) -> None:
        """Allocate a reduce slot for this unit alone."""
        buffer = self._collectives.allocate(unit.gradients.reduce_bytes, BufferKind.REDUCE)
        slot = self._own[unit] = Slot[Unit](self._collectives, buffer)
        unit.gradients.keep(slot)

    def release(self, units: Sequence[Unit]) -> None:
        """Free the memory of every slot, and of the gradient shards of groups without a gradient; `allocate` may be
        called again. Only between steps."""
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

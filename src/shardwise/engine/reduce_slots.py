"""Memory for gradients that are not reduced yet: the reduce slots of one engine's units. The `Reducer` decides which
unit holds which slot, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.comm.protocol import BufferKind, Collectives
from shardwise.engine.units.arena import Arena, Slot, size_classes
from shardwise.engine.units.unit import Unit

REDUCE_SLOTS = 2
"""Slots of a size class, besides one for each level of nesting: one unit collects gradients while the one before it is
being reduced."""


class ReduceSlots:
    """Reduce slots shared by a size class, and reduce slots of one unit alone. Every rank allocates and releases them
    alike."""

    def __init__(self, collectives: Collectives) -> None:
        """`collectives`: those that reduce gradients first."""
        self._collectives = collectives
        self.keeps_gradients = True
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
            if self.keeps_gradients and group.trainable:
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

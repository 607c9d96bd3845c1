"""Units that are resharded to a smaller group of ranks after forward (`reshard_after_forward=N`): backward gathers them
from secondary shards, N times as large, over that group alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.fsdp.collectives import BufferKind, Collectives
from shardwise.fsdp.engine import Engine
from shardwise.fsdp.mesh import Agreement, Mesh
from shardwise.fsdp.parameter_group import Group, Slices
from shardwise.fsdp.schedule import Schedule
from shardwise.fsdp.slots import Arena, Slot, size_classes
from shardwise.fsdp.unit import Unit
from shardwise.fsdp.unsharder import Unsharder, sizes


class SecondarySlices(Slices):
    """Slices over a smaller group of ranks, in memory of their own."""

    def __init__(self, groups: Sequence[Group], collectives: Collectives, pieces: Sequence[Tensor]) -> None:
        """`pieces`: the memory, by group."""
        super().__init__(groups, collectives)
        self._own = pieces

    def read_from(self, slot: Slot[Any], version: int) -> None:
        """Copy the slices out of a slot that holds weights of that version."""
        for piece, place in zip(self.pieces, self._places, strict=True):
            piece.copy_(slot.flat(*place))
        self.were_written(version, self.collectives.mark())


class SecondaryUnsharder(Unsharder):
    """The gather slots of an engine whose units have secondary shards."""

    def __init__(self, mesh: Mesh, log: Agreement, schedule: Schedule, slots: int) -> None:
        super().__init__(mesh, log, schedule, slots)
        assert mesh.secondary is not None
        self._over: Collectives = mesh.secondary
        self._smaller: Arena[Unit] | None = None
        """Slots of units that backward gathers over the smaller group."""
        self.secondary: dict[Unit, SecondarySlices] = {}
        """The secondary shards of the units that have them."""

    @property
    def all_slots(self) -> list[Slot[Unit]]:
        """Every slot but those that are shards themselves."""
        return [*super().all_slots, *(() if self._smaller is None else self._smaller.slots)]

    def allocate(self, units: Sequence[Unit]) -> None:
        """Allocate every slot and the secondary shards, once. Every rank must call this."""
        if self._smaller is not None:
            return
        super().allocate(units)
        again = [unit for unit in units if unit.reshards_after_forward and unit.settings.resharding is not True]
        classes = size_classes(sizes(again), lambda _: self._slots)
        self._smaller = Arena(BufferKind.GATHER)
        self._smaller.allocate(self._over, classes)
        self.slots.update((slot.key, slot) for slot in self._smaller.slots)
        for unit in again:
            self.secondary[unit] = _allocated(unit, self._over)

    def release(self, units: Sequence[Unit]) -> None:
        """Free the memory of every slot and of the secondary shards. Every rank must call this."""
        super().release(units)
        self._smaller = None
        self.secondary.clear()

    def reshard_after_forward(self, unit: Unit, wants_backward: bool) -> None:
        """As the base class, after this rank's secondary shard is copied out of the slot if backward needs it."""
        slices, slot = self.secondary.get(unit), unit.parameters.slot
        if wants_backward and slices is not None and slot is not None:
            slices.read_from(slot, unit.parameters.unsharded_version)
        self.reshard(unit)

    def settle(self) -> None:
        """Order the current stream after all reads of this rank's slices, so that these may be written."""
        super().settle()
        self._over.settle()

    def _arena_of(self, unit: Unit, again: bool) -> Arena[Unit]:
        if again and self._smaller is not None:
            slices = self.secondary.get(unit)
            if slices is not None and slices.version == unit.parameters.version:
                return self._smaller
        return super()._arena_of(unit, again)

    def _slices_for(self, unit: Unit, slot: Slot[Unit]) -> Slices:
        return self.secondary[unit] if slot.collectives is self._over else super()._slices_for(unit, slot)


def _allocated(unit: Unit, collectives: Collectives) -> SecondarySlices:
    """Return a secondary shard of the unit over the smaller group of ranks, with memory of its own."""
    pieces = [
        torch.empty(
            group.dtypes.stored_numel(group.layout.numel // collectives.world_size),
            dtype=group.dtypes.gathered,
            device=group.device,
        )
        for group in unit.groups
    ]
    return SecondarySlices(unit.groups, collectives, pieces)


def choose(mesh: Mesh) -> type[Unsharder] | None:
    """Return the class for a mesh with a smaller group of ranks; None for others."""
    return None if mesh.secondary is None else SecondaryUnsharder


def secondary_pieces(engine: Engine) -> dict[Unit, Sequence[Tensor]]:
    """Return the secondary shards of the engine's units that have them: this rank's slice of each group."""
    held = engine.unsharder.secondary if isinstance(engine.unsharder, SecondaryUnsharder) else {}
    return {unit: slices.pieces for unit, slices in held.items()}

"""Hybrid strategies: sums of the shard group are summed over the replicas as well."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.engine.reductions import CustomReducer, OwnSlots
from shardwise.fsdp.collectives import BufferKind, Reduction
from shardwise.fsdp.mesh import Agreement, Mesh
from shardwise.fsdp.reducer import Flight, Reducer
from shardwise.fsdp.slots import Arena, Slot, size_classes
from shardwise.fsdp.strategy import Strategy
from shardwise.fsdp.unit import Unit, by_mesh

SLICE_SLOTS = 2
"""Slice slots of a size class: the slices of two units are summed over replicas while two more units run backward."""


class HybridSlots(OwnSlots):
    """Reduce slots, and slots for slices that were summed in the shard group. These are summed over the replicas there,
    so that the reduce slot is free again."""

    def __init__(self) -> None:
        super().__init__()
        self.slices: Arena[Unit] | None = None
        """Slice slots, allocated on the replicate group, as reduce slots are on the shard group."""

    @property
    def all(self) -> list[Slot[Unit]]:
        """Every reduce slot and slice slot."""
        return [*super().all, *(() if self.slices is None else self.slices.slots)]

    def _allocate_shared(self, largest: Mapping[Unit, int], nesting: int) -> None:
        super()._allocate_shared(largest, nesting)
        self.slices = Arena(BufferKind.REDUCE)
        for mesh, members in by_mesh(largest).items():
            slices = [(unit, largest[unit] // mesh.shard.world_size) for unit in members]
            self.slices.allocate(mesh.replicate, size_classes(slices, lambda _: SLICE_SLOTS))

    def _drop_shared(self) -> None:
        super()._drop_shared()
        for slot in () if self.slices is None else self.slices.slots:
            slot.collectives.drop(slot.buffer)
        self.slices = None


class HybridReducer(CustomReducer):
    """Reductions over shards and replicas."""

    def __init__(self, mesh: Mesh, log: Agreement) -> None:
        super().__init__(mesh, log)
        self.slots = self._hybrid = HybridSlots()

    def start_mean(self, unit: Unit, slot: Slot[Unit], label: int) -> None:
        """Start to sum the slot in the shard group and, after that, over the replicas."""
        sums = self.claim(self.find_slot(self._hybrid.slices, unit), unit)
        groups = [group for group in unit.groups if group.trainable]
        slices = [group.slice_in(sums) for group in groups]
        reductions = tuple(
            Reduction(group.flat_gradients(slot), own, accumulate=False)
            for group, own in zip(groups, slices, strict=True)
        )
        scattered = unit.mesh.shard.reduce_scatter(slot.buffer, reductions, label)
        self.in_flight.append(Flight(unit, slot, [scattered]))
        works = [unit.mesh.replicate.all_reduce(own, after=scattered, label=label) for own in slices]
        self.in_flight.append(Flight(unit, sums, works, slices))


def choose(mesh: Mesh, strategy: Strategy) -> type[Reducer] | None:
    """Return the class for a mesh of several shards and several replicas; None for others."""
    return HybridReducer if mesh.shard.world_size > 1 and mesh.replicate.world_size > 1 else None

"""Reductions that are not written into the shard's gradient directly: sums in the shard group that wait for the
replicas, and sums that a user's hook sees first."""

from __future__ import annotations

from shardwise.engine.in_flight import Flight, InFlight
from shardwise.engine.mesh import Mesh
from shardwise.engine.units.arena import Slot
from shardwise.engine.units.unit import Unit


def lies_apart(unit: Unit, mesh: Mesh) -> bool:
    """Whether the unit's sums in the shard group must lie in memory of their own."""
    reducing, apart = unit.gradients.reducing, unit.gradients.apart
    if mesh.replicate.world_size == 1:
        return reducing.hook is not None
    waits = apart is not None and apart.is_waiting
    return mesh.shard.world_size > 1 and (waits or not reducing.over_replicas)


def start_apart(unit: Unit, slot: Slot[Unit], label: int, mesh: Mesh, in_flight: InFlight) -> None:
    """Start to reduce a slot into slices in memory of their own, where they may wait for the replicas. Every rank must
    call this."""
    in_flight.finish_of(unit)  # an earlier reduction may still use the slices
    apart, replicate = unit.gradients.collect_apart(), mesh.replicate
    alone = replicate.world_size == 1
    waits = not unit.gradients.reducing.over_replicas and not alone
    scattered = mesh.shard.reduce_scatter(slot.buffer, apart.reductions(slot), label)
    in_flight.append(Flight(unit, slot, [scattered], apart.slices if alone else ()))
    if not alone and not waits:
        works = [replicate.all_reduce(own, after=scattered, label=label) for own in apart.slices]
        in_flight.append(Flight(unit, None, works, apart.slices))
    apart.wait(waits)

"""Where one parameter lives: its place in a unit's flat layout and the group over which that is cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.protocol import Collectives
from shardwise.errors import UsageError
from shardwise.layout.flat import Entry, FlatLayout
from shardwise.layout.fragment import Fragment


@dataclass(frozen=True, eq=False)
class Placement:
    """The place of a parameter, its gradient and its optimizer state, which are all cut alike and share this object."""

    layout: FlatLayout
    index: int
    """Entry of `layout` that is this parameter."""
    shard_group: Collectives
    """The ranks that hold the slices."""
    replicas: Collectives | None = None
    """The ranks that hold the same slice of other copies; None until they are known."""

    @property
    def fqn(self) -> str:
        """The parameter's name in the model."""
        return self.layout.entries[self.index].fqn

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.layout.entries[self.index].shape

    @cached_property
    def fragment(self) -> Fragment:
        """This rank's piece."""
        return self.layout.fragment(self.index, self.shard_group.rank)

    @cached_property
    def as_real(self) -> Placement:
        """The placement of the same complex elements, seen as pairs of real ones."""
        entry = self.layout.entries[self.index]
        pairs = replace(entry, shape=(*entry.shape, 2), start=2 * entry.start, numel=2 * entry.numel)
        layout = replace(self.layout, entries=(pairs,), numel=2 * self.layout.numel)
        return Placement(layout, 0, self.shard_group, self.replicas)

    @cached_property
    def as_complex(self) -> Placement:
        """The placement of the same pairs of real elements, seen as complex ones. Slices hold whole pairs."""
        entry = self.layout.entries[self.index]
        whole = replace(entry, shape=entry.shape[:-1], start=entry.start // 2, numel=entry.numel // 2)
        layout = replace(self.layout, entries=(whole,), numel=self.layout.numel // 2)
        return Placement(layout, 0, self.shard_group, self.replicas)


def same_cut(a: Placement, b: Placement) -> bool:
    """Whether two tensors have the same shape, and the same elements on every rank. All ranks get the same answer, so
    that all of them raise or none."""
    if a is b:
        return True
    if a.shape != b.shape or a.layout.world_size != b.layout.world_size:
        return False
    start_a, start_b = (placement.layout.entries[placement.index].start for placement in (a, b))
    return a.layout.world_size == 1 or (start_a == start_b and a.layout.shard_numel == b.layout.shard_numel)


def cuts_at(placement: Placement, numel: int) -> bool:
    """Whether every rank's piece of a tensor begins at a multiple of `numel` elements. The same on every rank."""
    layout = placement.layout
    start = layout.entries[placement.index].start
    return layout.world_size == 1 or (start % numel == 0 and layout.shard_numel % numel == 0)


def of_blocks(placement: Placement, numel: int) -> Placement:
    """Return the placement of a tensor with one element for each block of `numel` elements of another tensor, for which
    `cuts_at` holds. Each element is on the rank that has the block."""
    layout = placement.layout
    entry = layout.entries[placement.index]
    count, start = -(-entry.numel // numel), entry.start // numel
    if layout.world_size == 1:
        start, total = 0, count
    else:
        total = layout.numel // numel
    blocks = FlatLayout((Entry(entry.fqn, (count,), start, count),), total, layout.world_size)
    return Placement(blocks, 0, placement.shard_group, placement.replicas)


@dataclass(frozen=True, slots=True)
class FlatPieces:
    """How a tensor is cut: rank r of the mesh holds the elements `ranges[r]`, [start, stop), of the flattened tensor.

    Not one of DTensor's placements, which cut whole rows: code that looks for those finds none.
    """

    ranges: tuple[tuple[int, int], ...]
    """By rank; many may be empty."""

    def is_shard(self, dim: int | None = None) -> bool:
        """False: the tensor is not cut along a dim."""
        return False

    def is_replicate(self) -> bool:
        """Whether there is one rank."""
        return len(self.ranges) == 1

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """False."""
        return False


def flat_pieces(placement: Placement) -> FlatPieces:
    """Return how a tensor is cut. No communication."""
    ranks = range(placement.shard_group.world_size)
    fragments = [placement.layout.fragment(placement.index, rank) for rank in ranks]
    return FlatPieces(tuple((fragment.start, fragment.stop) for fragment in fragments))


def device_mesh(placement: Placement) -> DeviceMesh:
    """Return a mesh of the shard group's ranks. No communication. Raises UsageError if there is no process group."""
    return mesh_of(placement.shard_group, placement.fqn)


def mesh_of(ranks: Collectives, fqn: str) -> DeviceMesh:
    """Return a mesh of these ranks. No communication. Raises UsageError, which names `fqn`, if there is no process
    group."""
    group = ranks.process_group
    if group is None and dist.is_initialized() and dist.get_world_size() == 1:
        group = dist.group.WORLD
    if group is None or not dist.is_initialized():
        raise UsageError(f"{fqn!r} lies on one rank without a process group: it has no device_mesh")
    return DeviceMesh.from_group(group, ranks.device.type, mesh_dim_names=("shard",))

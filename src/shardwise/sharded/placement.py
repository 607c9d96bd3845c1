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
    """Shared by a parameter, its gradient and its optimizer state: all are cut alike."""

    layout: FlatLayout
    index: int
    """Entry of `layout` that is this parameter."""
    shard_group: Collectives
    """The ranks that hold the slices."""
    replicas: Collectives | None = None
    """The ranks that hold the same slice of other copies; None until that is known."""

    @property
    def fqn(self) -> str:
        """The parameter's name in the model."""
        return self.layout.entries[self.index].fqn

    @property
    def shape(self) -> tuple[int, ...]:
        """Global."""
        return self.layout.entries[self.index].shape

    @cached_property
    def fragment(self) -> Fragment:
        """This rank's piece."""
        return self.layout.fragment(self.index, self.shard_group.rank)

    @cached_property
    def as_real(self) -> Placement:
        """Of the same complex elements as pairs of real ones."""
        entry = self.layout.entries[self.index]
        pairs = replace(entry, shape=(*entry.shape, 2), start=2 * entry.start, numel=2 * entry.numel)
        layout = replace(self.layout, entries=(pairs,), numel=2 * self.layout.numel)
        return Placement(layout, 0, self.shard_group, self.replicas)

    @cached_property
    def as_complex(self) -> Placement:
        """Of the same pairs of real elements as complex ones. Slices are of whole pairs."""
        entry = self.layout.entries[self.index]
        whole = replace(entry, shape=entry.shape[:-1], start=entry.start // 2, numel=entry.numel // 2)
        layout = replace(self.layout, entries=(whole,), numel=self.layout.numel // 2)
        return Placement(layout, 0, self.shard_group, self.replicas)


def same_cut(a: Placement, b: Placement) -> bool:
    """Whether two tensors of one shape have the same elements on every rank. All ranks answer alike, so that an error
    is everybody's."""
    if a is b:
        return True
    if a.shape != b.shape or a.layout.world_size != b.layout.world_size:
        return False
    start_a, start_b = (placement.layout.entries[placement.index].start for placement in (a, b))
    return a.layout.world_size == 1 or (start_a == start_b and a.layout.shard_numel == b.layout.shard_numel)


def cuts_at(placement: Placement, numel: int) -> bool:
    """Whether every rank's piece of a tensor begins at a multiple of so many elements. All ranks answer alike."""
    layout = placement.layout
    start = layout.entries[placement.index].start
    return layout.world_size == 1 or (start % numel == 0 and layout.shard_numel % numel == 0)


def of_blocks(placement: Placement, numel: int) -> Placement:
    """Of a tensor with one element for each block of so many of another (`cuts_at`), on the ranks that have those."""
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
        """False: not along a dim."""
        return False

    def is_replicate(self) -> bool:
        """Whether there is one rank."""
        return len(self.ranges) == 1

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """False."""
        return False


def flat_pieces(placement: Placement) -> FlatPieces:
    """The cut of a tensor. No communication."""
    ranks = range(placement.shard_group.world_size)
    fragments = [placement.layout.fragment(placement.index, rank) for rank in ranks]
    return FlatPieces(tuple((fragment.start, fragment.stop) for fragment in fragments))


def device_mesh(placement: Placement) -> DeviceMesh:
    """The ranks of its shard group. No communication. Raises UsageError where there is no process group."""
    return mesh_of(placement.shard_group, placement.fqn)


def mesh_of(ranks: Collectives, fqn: str) -> DeviceMesh:
    """Of these ranks, for that parameter. No communication. Raises UsageError where there is no process group."""
    group = ranks.process_group
    if group is None and dist.is_initialized() and dist.get_world_size() == 1:
        group = dist.group.WORLD
    if group is None or not dist.is_initialized():
        raise UsageError(f"{fqn!r} is on one rank without a process group, so it has no device_mesh")
    return DeviceMesh.from_group(group, ranks.device.type, mesh_dim_names=("shard",))

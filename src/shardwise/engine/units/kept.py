"""How a group's numbers are kept and travel: in a dtype each, or as blocks of few bits that are decoded where they are
computed with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.engine.units.arena import Slot
from shardwise.engine.units.size_classes import SLOT_ALIGN_BYTES
from shardwise.layout.flat import FlatLayout, round_up
from shardwise.sharded.blocks import BLOCK_NUMEL, Coder, block_bytes
from shardwise.sharded.few_bits import FewBitsParameter, blocks_of
from shardwise.sharded.parameter import Home, ShardedParameter
from shardwise.sharded.placement import Placement

ALIGN_BYTES = 16
"""Parameters and slices start on this boundary in the narrowest dtype that holds them."""


@dataclass(frozen=True, slots=True)
class Dtypes:
    """In which dtype a group is kept, computes and is reduced."""

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    bits: str | None = None
    """Kept and gathered in blocks of that kind (`sharded.blocks`), which stand for numbers of the master dtype."""
    travels: torch.dtype | None = None
    """What its class makes of it on its way (`extended.py`), cut in whole rows."""
    is_apart: bool = False
    """What is computed with then lies beside what came."""

    @property
    def align(self) -> int:
        """Elements that make ALIGN_BYTES in the narrowest of the three; of blocks, whose bytes are even, so many that
        their bytes are a multiple of it."""
        if self.bits is not None:
            return BLOCK_NUMEL * ALIGN_BYTES // 2
        if self.travels is not None:
            return 1
        return max(1, ALIGN_BYTES // min(self.master.itemsize, self.compute.itemsize, self.reduce.itemsize))

    @property
    def kept(self) -> torch.dtype:
        """Of the shard: the master dtype, or bytes of blocks."""
        return self.master if self.bits is None else torch.uint8

    @property
    def gathered(self) -> torch.dtype:
        """Of what travels: the compute dtype, bytes of blocks, or what its class makes of it."""
        return self.travels or (self.compute if self.bits is None else torch.uint8)

    def kept_numel(self, numel: int) -> int:
        """Elements of `kept`, or of `gathered`, that stand for `numel`, which `align` divides."""
        return numel if self.bits is None else numel // BLOCK_NUMEL * block_bytes(self.bits)

    def places(self, start_bytes: int, numel: int) -> tuple[int, int]:
        """Where what is gathered lies in a slot in which numbers lie from `start_bytes` on, and where both end: at the
        numbers' own place, or behind it."""
        gathered_bytes = round_up(self.kept_numel(numel) * self.gathered.itemsize, SLOT_ALIGN_BYTES)
        if self.bits is None and not self.is_apart:
            return start_bytes, start_bytes + gathered_bytes
        end = start_bytes + round_up(numel * self.compute.itemsize, SLOT_ALIGN_BYTES)
        return end, end + gathered_bytes

    def coder(self, device: torch.device) -> Coder | None:
        """Of the blocks, if these are kept."""
        return None if self.bits is None else Coder.on(device, self.bits)


class Keeper(Protocol):
    """What keeps numbers in one of these ways: a group."""

    dtypes: Dtypes
    layout: FlatLayout
    sharded: list[ShardedParameter]
    unsharded_start: int
    gathered_start: int

    @property
    def shard(self) -> Tensor:
        """This rank's."""


def outer_face(
    shard: Tensor | Home, dtypes: Dtypes, coder: Coder | None, placement: Placement, requires_grad: bool
) -> ShardedParameter:
    """Of a parameter, over its piece of the shard, or of what that is in between uses."""
    if dtypes.bits is not None and coder is not None:
        blocks = blocks_of(shard, placement.fragment, dtypes.bits) if isinstance(shard, Tensor) else shard
        return FewBitsParameter(blocks, coder, dtypes.master, placement)
    if isinstance(shard, Tensor):
        fragment = placement.fragment
        return ShardedParameter(shard[fragment.offset : fragment.offset + fragment.numel], placement, requires_grad)
    return ShardedParameter.at(shard, placement.shard_group.device, placement, requires_grad)


@torch.no_grad()
def decode(group: Keeper, slot: Slot[Any]) -> None:
    """Make numbers of the blocks that were gathered into a slot. Only of a group that keeps blocks."""
    numel, bits = group.layout.numel, group.dtypes.bits
    assert bits is not None
    faces = [face for face in group.sharded if isinstance(face, FewBitsParameter)]
    if not faces:
        return
    blocks = slot.flat(group.gathered_start, group.dtypes.kept_numel(numel), torch.uint8)
    flat = slot.flat(group.unsharded_start, numel, group.dtypes.compute)
    faces[0].coder.decode(blocks.view(-1, block_bytes(bits)), flat)
    for entry, face in zip(group.layout.entries, faces, strict=True):
        if face.added is not None:
            flat[entry.start : entry.stop].add_(face.added(0, entry.numel))


def copy_numbers(target: Keeper, source: Keeper) -> None:
    """Have a group keep the numbers of one that is alike. No communication."""
    target.shard.copy_(source.shard)
    for own, theirs in zip(target.sharded, source.sharded, strict=True):
        if isinstance(own, FewBitsParameter) and isinstance(theirs, FewBitsParameter):
            own.added = theirs.added

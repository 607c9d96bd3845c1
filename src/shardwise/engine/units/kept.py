"""How a group's numbers are kept and gathered: each in a dtype, or as blocks of few bits that are decoded in the slot
after the gather."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

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
    """The dtypes that a group is kept in, computes in and is reduced in."""

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    bits: str | None = None
    """Kind of the blocks (`sharded.blocks`) that it is kept and gathered in, which stand for master-dtype numbers; or
    None."""
    travels: torch.dtype | None = None
    """Dtype that the parameter's class makes of it for the gather (`extended.py`), cut into whole rows; or None."""
    is_apart: bool = False
    """Whether the tensor that is computed with then lies beside what was gathered."""

    @property
    def align(self) -> int:
        """Elements that make ALIGN_BYTES in the narrowest of the three. For blocks, each of an even number of bytes, as
        many elements as make the blocks' bytes a multiple of ALIGN_BYTES."""
        if self.bits is not None:
            return BLOCK_NUMEL * ALIGN_BYTES // 2
        if self.travels is not None:
            return 1
        return max(1, ALIGN_BYTES // min(self.master.itemsize, self.compute.itemsize, self.reduce.itemsize))

    @property
    def kept(self) -> torch.dtype:
        """Dtype of the shard: the master dtype, or bytes of blocks."""
        return self.master if self.bits is None else torch.uint8

    @property
    def gathered(self) -> torch.dtype:
        """Dtype of what is gathered: the compute dtype, bytes of blocks, or what the parameter's class makes of it."""
        return self.travels or (self.compute if self.bits is None else torch.uint8)

    def admit_wide_gradient(self, leaf: nn.Parameter) -> None:
        """If gradients are reduced in a wider dtype than the leaf's, let them arrive as an operation computed them.

        Autograd would round them to the leaf's dtype, such as an fp32 gradient of a bf16 weight that was multiplied
        with an fp32 tensor, as in norms.
        """
        if self.reduce.itemsize > self.compute.itemsize:
            leaf.grad_dtype = None

    def kept_numel(self, numel: int) -> int:
        """Return how many elements of `kept`, or of `gathered`, stand for `numel` numbers; `align` divides `numel`."""
        return numel if self.bits is None else numel // BLOCK_NUMEL * block_bytes(self.bits)

    def places(self, start_bytes: int, numel: int) -> tuple[int, int]:
        """Return where the gathered bytes start in a slot whose numbers start at `start_bytes`, and where both end. The
        gathered bytes lie in the place of the numbers, or behind it."""
        gathered_bytes = round_up(self.kept_numel(numel) * self.gathered.itemsize, SLOT_ALIGN_BYTES)
        if self.bits is None and not self.is_apart:
            return start_bytes, start_bytes + gathered_bytes
        end = start_bytes + round_up(numel * self.compute.itemsize, SLOT_ALIGN_BYTES)
        return end, end + gathered_bytes

    def coder(self, device: torch.device) -> Coder | None:
        """Return the coder of the blocks; None if the group is not kept in blocks."""
        return None if self.bits is None else Coder.on(device, self.bits)


class Keeper(Protocol):
    """A group, as far as it keeps numbers in one of these ways."""

    dtypes: Dtypes
    layout: FlatLayout
    sharded: list[ShardedParameter]
    unsharded_start: int
    gathered_start: int

    @property
    def shard(self) -> Tensor:
        """This rank's slice."""


def outer_face(
    shard: Tensor | Home, dtypes: Dtypes, coder: Coder | None, placement: Placement, requires_grad: bool
) -> ShardedParameter:
    """Make a parameter's outer face, over its piece of the shard or of the home in which that rests."""
    if dtypes.bits is not None and coder is not None:
        blocks = blocks_of(shard, placement.fragment, dtypes.bits) if isinstance(shard, Tensor) else shard
        return FewBitsParameter(blocks, coder, dtypes.master, placement)
    if isinstance(shard, Tensor):
        fragment = placement.fragment
        return ShardedParameter(shard[fragment.offset : fragment.offset + fragment.numel], placement, requires_grad)
    return ShardedParameter.at(shard, placement.shard_group.device, placement, requires_grad)


@torch.no_grad()
def decode(group: Keeper, slot: Slot[Any]) -> None:
    """Decode the blocks that were gathered into a slot. Only for a group that is kept in blocks."""
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
    """Copy the numbers of a group to one of the same layout and dtypes. No communication."""
    target.shard.copy_(source.shard)
    for own, theirs in zip(target.sharded, source.sharded, strict=True):
        if isinstance(own, FewBitsParameter) and isinstance(theirs, FewBitsParameter):
            own.added = theirs.added

"""Groups of frozen parameters that are stored and gathered as blocks of few bits, and decoded in the slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.fsdp.layout import round_up
from shardwise.fsdp.parameter_group import ALIGN_BYTES, Dtypes, Group, Versioned
from shardwise.fsdp.sharded_parameter import Placement, ShardedParameter
from shardwise.fsdp.slots import SLOT_ALIGN_BYTES, Slot
from shardwise.sharded.extensions.blocks import BLOCK_NUMEL, Coder, block_bytes
from shardwise.sharded.extensions.few_bits import FewBitsParameter, blocks_of


@dataclass(frozen=True)
class BlockDtypes(Dtypes):
    """The dtypes of a group in blocks, which stand for numbers of the master dtype."""

    bits: str
    """Kind of the blocks (`sharded.blocks`)."""

    @property
    def align(self) -> int:
        """As many elements as make the blocks' bytes, of which each has an even number, a multiple of ALIGN_BYTES."""
        return BLOCK_NUMEL * ALIGN_BYTES // 2

    @property
    def stored(self) -> torch.dtype:
        """Bytes of blocks."""
        return torch.uint8

    @property
    def gathered(self) -> torch.dtype:
        """Bytes of blocks."""
        return torch.uint8

    def stored_numel(self, numel: int) -> int:
        """Return how many bytes stand for `numel` numbers."""
        return numel // BLOCK_NUMEL * block_bytes(self.bits)

    def places(self, start_bytes: int, numel: int) -> tuple[int, int]:
        """As the base class; the blocks lie behind the numbers that are decoded from them."""
        end = start_bytes + round_up(numel * self.compute.itemsize, SLOT_ALIGN_BYTES)
        return end, end + round_up(self.stored_numel(numel), SLOT_ALIGN_BYTES)


class BlockGroup(Group):
    """A group of frozen parameters in blocks."""

    dtypes: BlockDtypes
    coder: Coder
    """Encodes and decodes its blocks. Set when the shard is allocated."""

    def _allocate_shard(self, storage: Tensor | None) -> Versioned:
        self.coder = Coder.on(self.device, self.dtypes.bits)
        return super()._allocate_shard(storage)

    def _sharded_parameter(self, placement: Placement, requires_grad: bool) -> ShardedParameter:
        blocks = blocks_of(self.shard, placement.fragment, self.dtypes.bits)
        return FewBitsParameter(blocks, self.coder, self.dtypes.master, placement)

    @torch.no_grad()
    def post_all_gather(self, slot: Slot[Any]) -> None:
        """Decode the blocks that were gathered into a slot."""
        if not self.sharded:
            return
        numel, bits = self.layout.numel, self.dtypes.bits
        blocks = slot.flat(self.gathered_start, self.dtypes.stored_numel(numel), torch.uint8)
        flat = slot.flat(self.unsharded_start, numel, self.dtypes.compute)
        self.coder.decode(blocks.view(-1, block_bytes(bits)), flat)
        for entry, sharded in zip(self.layout.entries, self.sharded, strict=True):
            added = sharded.added if isinstance(sharded, FewBitsParameter) else None
            if added is not None:
                flat[entry.start : entry.stop].add_(added(0, entry.numel))

"""Numbers in few bits: blocks of 64 elements, each with a scale of its own.

    | 32 bytes of codes (nf4), or 64 (int8) | scale, bf16 |

A block is stored in one piece, so a flat buffer of blocks is cut and gathered like one of numbers. Codes of nf4 are the
16 quantiles of a normal distribution scaled to [-1, 1] (QLoRA, arXiv:2305.14314, appendix E), two a byte, the first in
the high half; codes of int8 are 127ths. An element is its code times the scale: the block's largest magnitude, rounded
to bf16. So numbers that came out of blocks give the same blocks again, to the bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

BLOCK_NUMEL = 64
"""Elements of a block."""
SCALE_BYTES = 2
LARGEST_INT8 = 127
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The numbers of nf4, by code."""
CODE_BYTES = {"nf4": BLOCK_NUMEL // 2, "int8": BLOCK_NUMEL}
"""Bytes of codes in a block, by the name of its kind."""


def block_bytes(kind: str) -> int:
    """Bytes of one block of a kind, "nf4" or "int8"."""
    return CODE_BYTES[kind] + SCALE_BYTES


class Coder(NamedTuple):
    """Turns numbers into blocks and back, on one device. The memory that it needs besides is small, or freed soon."""

    kind: str
    pairs: Tensor
    """For nf4, by byte: the two numbers (fp32) of its codes, as one element of 8 bytes."""
    limits: Tensor
    """For nf4: the midpoints between neighbouring numbers."""

    @classmethod
    def on(cls, device: torch.device, kind: str) -> Coder:
        """Make a coder of that kind. No communication."""
        numbers = torch.tensor(NF4, dtype=torch.float32, device=device)
        high, low = numbers.repeat_interleave(len(NF4)), numbers.repeat(len(NF4))
        pairs = torch.stack([high, low], 1).flatten().view(torch.int64)
        return cls(kind, pairs, (numbers[1:] + numbers[:-1]) / 2)

    def encode(self, numbers: Tensor, blocks: Tensor) -> None:
        """Write numbers, in a few steps, into as many blocks as they fill.

        Args:
            numbers: 1-D, any float dtype, on any device.
            blocks: [blocks, bytes of a block], uint8.
        """
        step = _step(blocks)
        for start in range(0, len(blocks), step):
            into = blocks[start : start + step]
            part = numbers[start * BLOCK_NUMEL : (start + len(into)) * BLOCK_NUMEL].to(into.device, torch.float32)
            if part.numel() < into.shape[0] * BLOCK_NUMEL:  # the last block is not full
                part = torch.nn.functional.pad(part, (0, into.shape[0] * BLOCK_NUMEL - part.numel()))
            rows = part.view(-1, BLOCK_NUMEL)
            scales = rows.abs().amax(1, keepdim=True).to(torch.bfloat16)
            inverse = torch.where(scales == 0, 0.0, 1 / scales.float())
            code_bytes = CODE_BYTES[self.kind]
            into[:, :code_bytes] = self._codes(rows * inverse)
            into[:, code_bytes:] = scales.view(torch.uint8)

    def _codes(self, rows: Tensor) -> Tensor:
        """Return the codes of numbers that are in about [-1, 1]: one row of bytes a block."""
        if self.kind == "int8":
            whole = (rows * LARGEST_INT8).round_().clamp_(-LARGEST_INT8, LARGEST_INT8)
            return whole.to(torch.int8).view(torch.uint8)
        codes = torch.bucketize(rows, self.limits, out_int32=True).to(torch.uint8)
        return (codes[:, ::2] << 4) | codes[:, 1::2]

    def decode(self, blocks: Tensor, numbers: Tensor) -> None:
        """Write the numbers in blocks, rounded once, into a 1-D tensor of any float dtype on the blocks' device.

        Args:
            blocks: [blocks, bytes of a block], uint8.
            numbers: 64 elements for each block.
        """
        step = _step(blocks)
        for start in range(0, len(blocks), step):
            part = blocks[start : start + step]
            into = numbers[start * BLOCK_NUMEL : (start + step) * BLOCK_NUMEL].view(-1, BLOCK_NUMEL)
            codes, scales = part.split([CODE_BYTES[self.kind], SCALE_BYTES], 1)
            scales = scales.view(torch.bfloat16).float()
            if self.kind == "int8":
                torch.mul(codes.view(torch.int8).float(), scales / LARGEST_INT8, out=into)
            else:
                pairs = torch.index_select(self.pairs, 0, codes.reshape(-1).int())
                torch.mul(pairs.view(torch.float32).view(-1, BLOCK_NUMEL), scales, out=into)


def _step(blocks: Tensor) -> int:
    """Return how many blocks to work on at once: as many as stay in a CPU's cache, or keep an accelerator busy for
    longer than a launch takes (fake tensors, as in a plan, stand for one). Each takes about 400 bytes meanwhile."""
    is_real = not isinstance(blocks, FakeTensor)
    return 2**13 if blocks.device.type == "cpu" and is_real else 2**18

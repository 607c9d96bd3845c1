"""Moments in 8 bits: blocks of 256 elements, each with an fp32 scale, the block's largest magnitude.

An element is its block's scale times the number that its code stands for. Codes stand for 0 and for numbers in seven
decades below 1. Each decade has half as many numbers as the one above it, evenly spaced up to its end:

    signed    64 in (0.1, 1], 32 in (0.01, 0.1], ... 1 at 1e-6, and as many negative ones
    unsigned  128 in (0.1, 1], 64 in (0.01, 0.1], ... 2 up to 1e-6

The idea is Dettmers's dynamic map (arXiv:2110.02861), where numbers are halfway between these.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_NUMEL = 256
"""Elements in a block."""
NOISE_BITS = 20
"""Random bits that one stochastic rounding takes."""
_DECADES = 7
_SIGN = 128
"""The bit of a signed code that marks a negative number."""
_KEY_SHIFT = 15
"""Right shift of fp32 bits after which the exponent and eight bits of the mantissa remain."""
_FIRST, _LAST = (127 - 22) << 8, 127 << 8
"""The shifted bits of 2**-22, a number below all limits, and of 1."""


def blocks_of(numel: int) -> int:
    """Return how many blocks `numel` elements fill. The last one may be partly filled."""
    return -(-numel // BLOCK_NUMEL)


class Code(NamedTuple):
    """The signed or the unsigned code, with its tables on one device."""

    signed: bool
    numbers: Tensor
    """By code: the number that it stands for."""
    limits: Tensor
    """Magnitudes where the next code begins: signed, halfway between two numbers; unsigned, at the next number."""
    passed: Tensor
    """By a ratio's shifted bits: how many limits are below every ratio with these bits. At most one more limit can be
    below a given ratio, because limits are further apart than that."""

    @classmethod
    def on(cls, device: torch.device, signed: bool) -> Code:
        """Build the tables on a device. Does not communicate."""
        magnitudes = [0.0]
        for decade in range(_DECADES):
            count = 2**decade if signed else 2 ** (decade + 1)
            end = 10.0 ** (decade + 1 - _DECADES)
            magnitudes += [end * (0.1 + 0.9 * (place + 1) / count) for place in range(count)]
        numbers = magnitudes + [-number for number in magnitudes] if signed else magnitudes
        between = [(low + high) / 2 for low, high in pairwise(magnitudes)]
        limits = torch.tensor([*(between if signed else magnitudes[1:]), torch.inf], dtype=torch.float32, device=device)
        firsts = torch.arange(_FIRST, _LAST + 1, dtype=torch.int32, device=device) << _KEY_SHIFT
        passed = torch.bucketize(firsts.view(torch.float32), limits, out_int32=True)
        return cls(signed, torch.tensor(numbers, dtype=torch.float32, device=device), limits, passed)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the elements that codes stand for: 1-D, fp32, rounded once.

        Args:
            codes: 1-D, uint8, beginning with the first of a block.
            scales: the blocks' scales.
        """
        return self.numbers.index_select(0, codes.int()).mul_(_spread(scales, len(codes)))

    def encode(self, elements: Tensor, codes: Tensor, scales: Tensor, noise: Tensor) -> None:
        """Write elements as codes, and the scales of their blocks.

        Signed elements are rounded to the nearest number, unsigned ones stochastically, but never to 0 unless they are
        0. An element that is not finite makes its whole block non-finite.

        Args:
            elements: 1-D, fp32.
            codes, scales: written; as for `decode`.
            noise: integers whose last `NOISE_BITS` bits are random.
        """
        magnitude = elements.abs()
        missing = len(scales) * BLOCK_NUMEL - len(magnitude)
        rows = torch.nn.functional.pad(magnitude, (0, missing)) if missing else magnitude
        scales.copy_(rows.view(-1, BLOCK_NUMEL).amax(1))
        ratio = magnitude.div_(_spread(torch.where(scales > 0, scales, 1.0), len(codes)))
        found = self._limits_below(ratio)
        if self.signed:
            found.add_((elements < 0) * _SIGN)
        else:
            found = self._at_random(ratio, found, noise)
        codes.copy_(found)

    def _limits_below(self, ratio: Tensor) -> Tensor:
        """Return how many limits each ratio has reached. `torch.bucketize` would take ten times as long on a CPU."""
        key = (ratio.view(torch.int32) >> _KEY_SHIFT).sub_(_FIRST).clamp_(0, _LAST - _FIRST)
        found = self.passed.index_select(0, key)
        return found.add_(ratio >= self.limits.index_select(0, found))

    def _at_random(self, ratio: Tensor, below: Tensor, noise: Tensor) -> Tensor:
        """Return at random, right on average, the code of the number below each ratio or the next one."""
        low = self.numbers.index_select(0, below)
        gap = self.limits.index_select(0, below).sub_(low)
        is_next = (noise & (2**NOISE_BITS - 1)) < (ratio - low).div_(gap).mul_(2**NOISE_BITS)
        return torch.maximum(below.add_(is_next), (ratio > 0).int())


def _spread(scales: Tensor, numel: int) -> Tensor:
    """Repeat each block's scale for its elements."""
    return scales.unsqueeze(1).expand(-1, BLOCK_NUMEL).reshape(-1)[:numel]

"""Stochastic rounding: right on average, with random bits that do not depend on which rank holds an element."""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

_BITS = 16
"""Bits of an fp32 number that bf16 lacks."""


def key_of(seed: int, name: str, step: int) -> int:
    """Return the key of `random_bits` for one step of one parameter."""
    return int(xxhash.xxh3_64_intdigest(f"{seed}|{name}|{step}".encode())) - 2**63


def random_bits(first: int, count: int, key: int, device: torch.device) -> Tensor:
    """Return 64 random bits for each of the elements [first, first + count), as int64: splitmix64 of key and index."""
    bits = torch.arange(first, first + count, dtype=torch.int64, device=device)
    bits = bits.mul_(_signed(0x9E3779B97F4A7C15)).add_(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = bits.bitwise_xor_((bits >> shift) & (2 ** (64 - shift) - 1)).mul_(_signed(factor))
    return bits.bitwise_xor_((bits >> 31) & (2**33 - 1))


def rounded(values: Tensor, numbers: Tensor) -> Tensor:
    """Round fp32 values in place to one of the two nearest bf16 numbers; the 16 low bits of `numbers` are random."""
    noise = (numbers & (2**_BITS - 1)).int()
    return values.view(torch.int32).add_(noise).bitwise_and_(-(2**_BITS)).view(torch.float32)


def _signed(number: int) -> int:
    """Return the int64 with the bits of a uint64."""
    return number - 2**64 if number >= 2**63 else number

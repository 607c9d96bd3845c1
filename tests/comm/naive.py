"""References for tests of collectives: inputs that a rank can compute for any other rank, and plain loops for sums."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.backends.gloo import GlooCollectives
from shardwise.comm.backends.shared_memory.collectives import ShmCollectives
from shardwise.comm.torch_channels import ChannelCollectives
from shardwise.fsdp.collectives import Collectives

KINDS = ("gloo", "shm")
"""Collectives that add in rank order."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def collectives(kind: str, poison: bool | None = None) -> Collectives:
    """Return collectives of one kind over the default group."""
    group = dist.group.WORLD
    assert group is not None
    made: dict[str, Callable[..., Collectives]] = {
        "gloo": GlooCollectives,
        "shm": ShmCollectives,
        "torch": partial(ChannelCollectives, device="cpu"),
    }
    return made[kind](group, poison=poison)


def values(seed: int, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return the input of rank `rank`: numbers of many magnitudes, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    if not dtype.is_floating_point:
        return torch.randint(-1000, 1000, (numel,), generator=generator).to(dtype)
    spread = torch.randn(numel, generator=generator, dtype=torch.float64).exp() * 3
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * spread).to(dtype)


def sum_in_rank_order(terms: list[Tensor]) -> Tensor:
    """Return ((t0 + t1) + t2) + ... in fp32, fp64 or integers, element by element."""
    wide = torch.float32 if terms[0].dtype.is_floating_point and terms[0].itemsize < 4 else terms[0].dtype
    total = terms[0].to(wide)
    for term in terms[1:]:
        total = total + term.to(wide)
    return total


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether dtype, shape and every bit are equal."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return left.contiguous().view(-1).view(torch.uint8).equal(right.contiguous().view(-1).view(torch.uint8))

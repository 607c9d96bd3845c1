"""The bytes that a strategy must send, by arithmetic on parameter sizes alone, with no engine imported."""

from dataclasses import dataclass

import torch

from benchmarks.common.gpt import GPT, GPTShape

ALIGNMENT_BYTES = 16
FP32_BYTES = 4
_RESHARDS_AFTER_FORWARD = {"full_shard", "hybrid_shard"}


@dataclass(frozen=True)
class Unit:
    """A unit's parameters, by numel in registration order.

    `stays_gathered`: its backward follows its forward at once, so it is gathered once a step.
    """

    name: str
    numels: tuple[int, ...]
    stays_gathered: bool = False

    def padded_bytes(self, ranks: int) -> int:
        """Every parameter on a 16-byte boundary, and so every rank's slice."""
        aligned = sum(_round_up(numel * FP32_BYTES, ALIGNMENT_BYTES) for numel in self.numels)
        return _round_up(aligned, ALIGNMENT_BYTES * ranks)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def gpt_units(shape: GPTShape) -> list[Unit]:
    """Return the GPT's automatic units: each block, a large token embedding and head alone, the rest in the root."""
    with torch.device("meta"):
        model = GPT(shape)
    block_numel = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    members: dict[str, list[int]] = {}
    for fqn, parameter in model.named_parameters():
        members.setdefault(_unit_of(fqn, parameter.numel(), block_numel), []).append(parameter.numel())
    last = [name for name in members if name != "root"][-1]
    return [Unit(name, tuple(numels), name in (last, "root")) for name, numels in members.items()]


def _unit_of(fqn: str, numel: int, block_numel: int) -> str:
    first, second, *_ = fqn.split(".")
    if first == "blocks":
        return f"{first}.{second}"
    return first if first in ("token_embedding", "head") and 2 * numel >= block_numel else "root"


def sent_bytes(units: list[Unit], strategy: str, ranks: int) -> int:
    """Return the bytes each rank sends in one step of `strategy` with all ranks in one shard group.

    One reduction, one gather, and one gather more for a unit that was resharded after its forward.
    """
    total = 0
    for unit in units:
        passes = 3 if strategy in _RESHARDS_AFTER_FORWARD and not unit.stays_gathered else 2
        total += passes * unit.padded_bytes(ranks) * (ranks - 1) // ranks
    return total


def control_bytes(units: list[Unit], ranks: int) -> int:
    """Return what each rank sends besides: at the end of backward one byte a parameter to every peer, its used flag.

    Up to a few KiB, which ranks exchange directly.
    """
    return (ranks - 1) * sum(len(unit.numels) for unit in units)

"""Settings that a call of `shard` gives the units that it makes, besides the dtypes of their groups; and settings of
their reductions, which may be changed at any time outside a backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class UnitSettings:
    """Settings of one unit."""

    resharding: bool | int = True
    """Whether to reshard after forward; a number: to groups of so many ranks."""
    inputs: str | None = None
    """Torch's name of the dtype that floating-point inputs of its module are cast to; None: no cast."""
    output: str | None = None
    """The same for its output."""


PLAIN = UnitSettings()


@dataclass(frozen=True, slots=True)
class Reducing:
    """What reductions make of a unit's gradients. Alike on every rank, and not changed inside a backward."""

    now: bool = True
    """Whether they are reduced in their own backward; else they wait, unreduced, for a later one that reduces them."""
    over_replicas: bool = True
    """Whether they are summed over replicas; else they wait, summed in the shard group, for a later backward."""
    divisor: float | None = None
    """What the sum is divided by; None: the number of ranks."""
    hook: Callable[[Tensor], None] | None = None
    """Called with this rank's slice of each reduction's result, which it may change."""


MEAN = Reducing()

"""What a call of `shard` says of the units that it makes, besides the dtypes of their groups; and what may be changed
of their reductions at any time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class UnitSettings:
    """Of one unit."""

    resharding: bool | int = True
    """After forward; a number: to groups of so many ranks."""
    inputs: str | None = None
    """Floating-point inputs of its module are cast to that dtype, by torch's name."""
    output: str | None = None
    """Likewise its output."""


PLAIN = UnitSettings()


@dataclass(frozen=True, slots=True)
class Reducing:
    """What a unit's gradients become. Alike on every rank, and not changed inside a backward."""

    now: bool = True
    """Else they wait, unreduced, for a backward that reduces them."""
    over_replicas: bool = True
    """Else they wait, summed in the shard group, for a backward that sums them over the replicas too."""
    divisor: float | None = None
    """Of the sum; None: the number of ranks."""
    hook: Callable[[Tensor], None] | None = None
    """Called with this rank's slice of what each reduction gives, which it may change."""


MEAN = Reducing()

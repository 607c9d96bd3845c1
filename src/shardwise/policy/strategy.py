"""Strategies: which of {parameters, gradients, optimizer state} are sharded, as data."""

from __future__ import annotations

import difflib
import enum
from dataclasses import dataclass

from shardwise.errors import ConfigError

LEAST_SLOTS = 2
"""Fewest arena slots per size class: one unit computes while the next one is gathered."""


OTHER_NAMES = {
    "ddp": "no_shard",
    "zero1": "shard_optimizer",
    "zero2": "shard_grad_op",
    "zero3": "full_shard",
    "fsdp": "full_shard",
    "hsdp": "hybrid_shard",
}
"""The field's names of strategies. They are taken wherever ours are; results and files show ours."""


@dataclass(frozen=True, slots=True)
class _Traits:
    sharded: bool
    replicated: bool
    keeps_params: bool
    keeps_grads: bool


class Strategy(enum.Enum):
    """How model state is spread over the ranks (ZeRO stages: arXiv:1910.02054; hybrid: arXiv:2304.11277).

    The value is the lower-case name used in configurations. The field's names in `OTHER_NAMES` are taken too. Each
    member's traits tell the engine what to do.
    """

    NO_SHARD = "no_shard"
    """Everything replicated (DDP)."""
    SHARD_OPTIMIZER = "shard_optimizer"
    """ZeRO-1: gathered parameters and full-size gradient buffers stay; masters and optimizer state are sharded."""
    SHARD_GRAD_OP = "shard_grad_op"
    """ZeRO-2: gathered parameters stay until the optimizer steps; gradients and optimizer state are sharded."""
    FULL_SHARD = "full_shard"
    """ZeRO-3: a unit's parameters are gathered while it runs."""
    HYBRID_SHARD = "hybrid_shard"
    """FULL_SHARD inside a shard group, replicated across groups."""
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2"
    """SHARD_GRAD_OP inside a shard group, replicated across groups."""

    @property
    def sharded(self) -> bool:
        """Whether the shard group has more than one rank."""
        return _TRAITS[self].sharded

    @property
    def replicated(self) -> bool:
        """Whether there is a replicate group."""
        return _TRAITS[self].replicated

    @property
    def keeps_params(self) -> bool:
        """Whether gathered parameters stay until the weights change: a slot per unit, not a few per size class."""
        return _TRAITS[self].keeps_params

    @property
    def keeps_grads(self) -> bool:
        """Whether every unit has a full-size gradient buffer of its own."""
        return _TRAITS[self].keeps_grads

    @classmethod
    def parse(cls, value: Strategy | str) -> Strategy:
        """Return a member given as itself, by its lower-case name or by one of `OTHER_NAMES`. Raises ConfigError that
        names the nearest."""
        if isinstance(value, cls):
            return value
        names = {member.value: member for member in cls}
        every = names | {other: names[name] for other, name in OTHER_NAMES.items()}
        if isinstance(value, str) and value in every:
            return every[value]
        near = difflib.get_close_matches(str(value).lower(), every, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"unknown strategy {value!r}; {hint}must be one of {', '.join(names)}, or another name for one of them: "
            f"{', '.join(f'{other} ({name})' for other, name in OTHER_NAMES.items())}"
        )


_TRAITS = {
    Strategy.NO_SHARD: _Traits(sharded=False, replicated=True, keeps_params=True, keeps_grads=False),
    Strategy.SHARD_OPTIMIZER: _Traits(sharded=True, replicated=False, keeps_params=True, keeps_grads=True),
    Strategy.SHARD_GRAD_OP: _Traits(sharded=True, replicated=False, keeps_params=True, keeps_grads=False),
    Strategy.FULL_SHARD: _Traits(sharded=True, replicated=False, keeps_params=False, keeps_grads=False),
    Strategy.HYBRID_SHARD: _Traits(sharded=True, replicated=True, keeps_params=False, keeps_grads=False),
    Strategy.HYBRID_SHARD_ZERO2: _Traits(sharded=True, replicated=True, keeps_params=True, keeps_grads=False),
}

"""Strategies by name, as users give them."""

from __future__ import annotations

from difflib import get_close_matches

from shardwise.errors import ConfigError
from shardwise.fsdp.strategy import Strategy

OTHER_NAMES = {
    "ddp": "no_shard",
    "zero1": "shard_optimizer",
    "zero2": "shard_grad_op",
    "zero3": "full_shard",
    "fsdp": "full_shard",
    "hsdp": "hybrid_shard",
}
"""The field's names of strategies. They are taken wherever ours are; results and files show ours."""


def strategy_of(value: Strategy | str) -> Strategy:
    """Return a member given as itself, by its lower-case name or by one of `OTHER_NAMES`. Raises ConfigError that names
    the nearest."""
    if isinstance(value, Strategy):
        return value
    names = {member.value: member for member in Strategy}
    every = names | {other: names[name] for other, name in OTHER_NAMES.items()}
    if isinstance(value, str) and value in every:
        return every[value]
    near = get_close_matches(str(value).lower(), every, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"unknown strategy {value!r}; {hint}must be one of {', '.join(names)}, or another name for one of them: "
        f"{', '.join(f'{other} ({name})' for other, name in OTHER_NAMES.items())}"
    )

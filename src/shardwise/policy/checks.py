"""Checks of arguments that programs give; each raises ConfigError and names the argument and its value."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.errors import ConfigError
from shardwise.fsdp.strategy import Precision
from shardwise.suggest import did_you_mean


def checked_resharding(value: bool | int | None) -> bool | int | None:
    """Check `reshard_after_forward`; a group of one rank means no resharding."""
    if value is None or isinstance(value, bool):
        return value
    number: object = value
    if not isinstance(number, int) or value < 1:
        raise ConfigError(f"reshard_after_forward={value!r}: must be None, True, False or a number of ranks")
    return False if value == 1 else value


def checked_precision(value: Precision | None) -> Precision | None:
    """Check that a precision is one, or None."""
    if value is not None and not isinstance(value, Precision):
        raise ConfigError(f"precision={value!r}: pass sw.Precision(param=..., reduce=...)")
    return value


def checked_align(value: int | None) -> int | None:
    """Check that an alignment is a number of elements, or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"align={value!r}: must be a whole number of elements, at least 1")
    return value


def check_choice(name: str, value: object, choices: Sequence[str], or_none: bool = False) -> None:
    """Raise ConfigError unless the value is one of the choices; the message names the nearest."""
    if value not in choices:
        known = ", ".join(choices) + ", or None" * or_none
        raise ConfigError(f"{name}={value!r}: must be one of {known}{did_you_mean(str(value), choices)}")


def check_count(name: str, value: object, least: int) -> None:
    """Raise ConfigError unless the value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r}: must be a whole number of at least {least}")

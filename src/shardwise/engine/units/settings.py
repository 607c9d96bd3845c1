"""What a call of `shard` says of the units that it makes, besides the dtypes of their groups."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one unit."""

    resharding: bool | int = True
    """After forward; a number: to groups of so many ranks."""
    inputs: str | None = None
    """Floating-point inputs of its module are cast to that dtype, by torch's name."""
    output: str | None = None
    """Likewise its output."""


PLAIN = Settings()

"""Low-rank adapters beside a frozen model, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from shardwise.errors import ConfigError
from shardwise.fsdp.strategy import SHORT_NAMES
from shardwise.policy.words import check_names, entries

_BETWEEN_TARGETS = "+"
_PARSED: dict[str, Callable[[str], object]] = {
    "r": int,
    "dropout": float,
    "targets": lambda words: tuple(words.split(_BETWEEN_TARGETS)),
}
"""By field: how its value in words is parsed. Other fields are strings."""
_FORM = "a rank, or r=16 and some of targets=q_proj+v_proj, dropout=0.1, dtype=fp32, separated by commas"


@dataclass(frozen=True, slots=True)
class Adapters:
    """Settings of PEFT's adapters, in fp32, as the trainer's `[lora]` makes them. Invalid values raise ConfigError."""

    r: int
    """Rank of the adapters."""
    targets: tuple[str, ...] | None = None
    """Names of the linear layers that get them, such as "q_proj". None: all but the head."""
    dropout: float = 0.0
    """Fraction of an adapter's inputs that is dropped."""
    dtype: str | None = None
    """Short name of the dtype that the frozen model is kept in. None: its compute dtype."""

    def __post_init__(self) -> None:
        if isinstance(self.r, bool) or not isinstance(self.r, int) or self.r < 1:
            raise ConfigError(f"lora.r={self.r!r}: must be a whole number of at least 1")
        if self.targets is not None:
            object.__setattr__(self, "targets", tuple(self.targets))
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ConfigError(f"lora.dropout={self.dropout!r}: must be a number of at least 0 and below 1")
        if self.dtype is not None and self.dtype not in SHORT_NAMES.values():
            raise ConfigError(f"lora.dtype={self.dtype!r}: must be one of {', '.join(SHORT_NAMES.values())}, or None")

    @classmethod
    def of(cls, asked: object) -> Adapters | None:
        """Build from a rank, a mapping of the fields, or words such as "16" or
        "r=16,targets=q_proj+v_proj,dtype=fp32". Returns None for None or rank 0. Raises ConfigError."""
        if asked is None or isinstance(asked, cls):
            return asked
        if isinstance(asked, str):
            asked = int(asked) if asked.isdecimal() else entries("lora", asked, _FORM, _PARSED)
        if isinstance(asked, Mapping):
            check_names("lora", asked, [field.name for field in fields(cls)])
            if "r" not in asked:
                raise ConfigError(f"lora={dict(asked)!r} has no rank: add r, such as r=16")
            return cls(**asked)
        if isinstance(asked, bool) or not isinstance(asked, int) or asked < 0:
            raise ConfigError(
                f"lora={asked!r}: must be a whole number of at least 0, or words such as 'r=16,targets=q_proj+v_proj'"
            )
        return cls(asked) if asked else None

    @property
    def words(self) -> str:
        """The settings as written on a command line."""
        if self == Adapters(self.r):
            return str(self.r)
        given: dict[str, object] = {
            "r": self.r,
            "targets": None if self.targets is None else _BETWEEN_TARGETS.join(self.targets),
            "dropout": self.dropout or None,
            "dtype": self.dtype,
        }
        return ",".join(f"{name}={value}" for name, value in given.items() if value is not None)

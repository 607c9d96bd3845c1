"""Where a job keeps shards and optimizer state between uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from shardwise.errors import ConfigError
from shardwise.policy.offload import Offload

_PLACES = ("cpu", "nvme")
_NONE = "none"


@dataclass(frozen=True, slots=True)
class Places:
    """As `sw.Offload` has them."""

    params: str | None = None
    """Of shards: None, the device; "cpu", the host's memory; "nvme", a file."""
    optimizer: str | None = None
    """Of optimizer state, likewise."""

    def __post_init__(self) -> None:
        for known in fields(self):
            place = getattr(self, known.name)
            if place is not None and place not in _PLACES:
                raise ConfigError(f"offload.{known.name}={place!r}: None, 'cpu' or 'nvme'")

    @classmethod
    def of(cls, asked: object) -> Places | None:
        """From a `sw.Offload`, a mapping, or words: "optimizer=cpu", "params=cpu,optimizer=nvme", "cpu" or "nvme" for
        both, "none". None where nothing lies elsewhere. Raises ConfigError."""
        if asked is None or asked == _NONE:
            return None
        if isinstance(asked, str):
            asked = dict.fromkeys(("params", "optimizer"), asked) if asked in _PLACES else _entries(asked)
        if isinstance(asked, Places | Offload):
            found = cls(asked.params, asked.optimizer)
        elif isinstance(asked, Mapping):
            unknown = [name for name in asked if name not in {"params", "optimizer"}]
            if unknown:
                raise ConfigError(f"offload: {unknown[0]!r} is neither params nor optimizer")
            found = cls(**{name: None if place == _NONE else place for name, place in asked.items()})
        else:
            raise ConfigError(f"offload={asked!r}: words such as 'params=cpu,optimizer=nvme', or sw.Offload(...)")
        return None if found == cls() else found

    @property
    def words(self) -> str:
        """As they are written on a command line."""
        given = {known.name: getattr(self, known.name) for known in fields(self)}
        return ",".join(f"{name}={place}" for name, place in given.items() if place is not None)

    def refusal(self, on_cpu: bool) -> str:
        """What the engine says to that; nothing where it trains so.

        Args:
            on_cpu: ranks are a CPU's.
        """
        try:
            Offload(self.params, self.optimizer, path=".").check_device("cpu" if on_cpu else "gpu")
        except ConfigError as error:
            return str(error)
        return ""


def _entries(words: str) -> dict[str, str]:
    found = {}
    for entry in words.split(","):
        name, equals, place = (part.strip() for part in entry.partition("="))
        if not equals:
            raise ConfigError(
                f"offload={words!r}: params=PLACE, optimizer=PLACE or both with a comma between, where PLACE is cpu, "
                "nvme or none"
            )
        found[name] = place
    return found

"""Where a job keeps shards, optimizer state and reduced gradients between uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from shardwise.errors import ConfigError
from shardwise.policy.offload import PLACES, Offload, check
from shardwise.policy.words import check_names, entries

_NONE = "none"
_ALONE = ("params", "optimizer")
"""The kinds that a place without a kind applies to."""
_MIB = 2**20
_READ: dict[str, Callable[[str], object]] = {"ring_bytes": int, "ring_mib": lambda mib: int(mib) * _MIB}
_FORM = (
    "params=PLACE, optimizer=PLACE, gradients=PLACE, step=PLACE, or several of them separated by commas; PLACE is cpu, "
    "nvme or none, and for gradients and step cpu or none; or cpu or nvme alone, which is for params and optimizer"
)


@dataclass(frozen=True, slots=True)
class Places:
    """The places of `sw.Offload`, without its path."""

    params: str | None = None
    """Where shards rest. None: on the device. "cpu": in host memory. "nvme": in a file."""
    optimizer: str | None = None
    """Where optimizer state rests, likewise."""
    ring_bytes: int | None = None
    """Size of the ring on a rank's device through which optimizer state passes in its step. None: the default."""
    gradients: str | None = None
    """Where reduced gradients rest: None or "cpu"."""
    step: str | None = None
    """Which processor takes the optimizer's step: None (the device) or "cpu"."""

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def of(cls, asked: object) -> Places | None:
        """Build from a `sw.Offload`, a mapping, or words: "optimizer=cpu", "params=cpu,optimizer=nvme,ring_mib=64",
        "cpu" or "nvme" for both params and optimizer, "none". Returns None if nothing rests elsewhere than on the
        device. Raises ConfigError."""
        if asked is None or asked == _NONE:
            return None
        if isinstance(asked, str):
            alone: dict[str, object] = dict.fromkeys(_ALONE, asked)
            asked = alone if asked in PLACES["params"] else entries("offload", asked, _FORM, _READ)
            if "ring_mib" in asked:
                asked["ring_bytes"] = asked.pop("ring_mib")
        if isinstance(asked, Places | Offload):
            found = cls(asked.params, asked.optimizer, asked.ring_bytes, asked.gradients, asked.step)
        elif isinstance(asked, Mapping):
            check_names("offload", asked, [field.name for field in fields(cls)])
            found = cls(**{name: None if place == _NONE else place for name, place in asked.items()})
        else:
            raise ConfigError(
                f"offload={asked!r}: must be words such as 'params=cpu,optimizer=nvme', or sw.Offload(...)"
            )
        return found if any(getattr(found, name) for name in PLACES) else None

    @property
    def words(self) -> str:
        """The places as written on a command line."""
        given = {name: getattr(self, name) for name in PLACES}
        if self.ring_bytes is not None:
            whole, rest = divmod(self.ring_bytes, _MIB)
            given |= {"ring_bytes": self.ring_bytes} if rest else {"ring_mib": whole}
        return ",".join(f"{name}={place}" for name, place in given.items() if place is not None)

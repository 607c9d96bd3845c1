"""What lies elsewhere than on the device, as data."""

from __future__ import annotations

import os
from dataclasses import dataclass

from shardwise.errors import ConfigError

_PLACES = (None, "cpu", "nvme")


@dataclass(frozen=True, slots=True)
class Offload:
    """Where the optimizer's state of the units that a call of `sw.shard` makes is kept between steps."""

    params: str | None = None
    """Of shards. None: the device. "cpu": the host, which on CPU ranks is the same. "nvme" is not there yet."""
    optimizer: str | None = None
    """Of the optimizer's state. None: beside the shards. "cpu": the host, which on CPU ranks is the same. "nvme": one
    file for each rank in `path`, on CPU ranks."""
    path: str | os.PathLike[str] | None = None
    """Directory for the files, on a disk of this machine; made if it is not there."""
    pin: bool = True
    """Host memory that the device reads is pinned. There is none on CPU ranks."""
    ring_bytes: int | None = None
    """Host memory on a rank through which state goes to and from disk; None: four times the largest parameter's state,
    64 MiB at least."""

    def __post_init__(self) -> None:
        for field in ("params", "optimizer"):
            if getattr(self, field) not in _PLACES:
                raise ConfigError(f"offload.{field}={getattr(self, field)!r}: None, 'cpu' or 'nvme'")
        if self.params == "nvme":
            raise ConfigError("offload.params='nvme' is not there yet: only the optimizer's state can be on disk")
        if self.optimizer == "nvme" and self.path is None:
            raise ConfigError("offload.optimizer='nvme' needs offload.path: a directory on a local disk")
        if self.ring_bytes is not None and (isinstance(self.ring_bytes, bool) or self.ring_bytes < 1):
            raise ConfigError(f"offload.ring_bytes={self.ring_bytes!r}: a number of bytes, at least 1")

    def check_device(self, kind: str) -> None:
        """Raise ConfigError for what cannot be on a device of this kind yet."""
        for field in ("params", "optimizer"):
            if kind != "cpu" and getattr(self, field) is not None:
                raise ConfigError(
                    f"offload.{field}={getattr(self, field)!r} on {kind} is not there yet: it works on CPU ranks alone"
                )

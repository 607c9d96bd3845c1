"""What lies elsewhere than on the device, as data."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ConfigError

PLACES = {"params": ("cpu", "nvme"), "optimizer": ("cpu", "nvme"), "gradients": ("cpu",)}
"""By kind: where it may rest other than on the device."""


@dataclass(frozen=True, slots=True)
class Offload:
    """Where shards, optimizer state and reduced gradients are between uses, of the units that a call of `sw.shard`
    makes."""

    params: str | None = None
    """Of shards. None: the device. "cpu": the host's memory, which on CPU ranks is the same. "nvme": a file of each
    rank in `path`. The device has four times the largest unit's slice beside its slots, and for "nvme" the host as
    much."""
    optimizer: str | None = None
    """Of the optimizer's state. None: beside the shards. "cpu": the host's memory, which on CPU ranks is the same.
    "nvme": a file of each rank in `path`."""
    path: str | os.PathLike[str] | None = None
    """Directory for the files, on a disk of this machine; made if it is not there."""
    pin: bool = True
    """Host memory, "nvme"'s too, is pinned, so that the device copies from and to it by itself, beside what the host
    does."""
    ring_bytes: int | None = None
    """Memory of a rank's device through which optimizer state comes to its step and goes back, and for "nvme" of its
    host; None: four times the largest parameter's state, 64 MiB at least."""
    gradients: str | None = None
    """Of reduced gradients, until the step. None: the device. "cpu": the host's memory, which on CPU ranks is the same;
    the device has four times the largest unit's slice. Where the optimizer steps in backward they rest nowhere."""

    def __post_init__(self) -> None:
        check(self)
        for kind in PLACES:
            if getattr(self, kind) == "nvme" and self.path is None:
                raise ConfigError(f"offload.{kind}='nvme' needs offload.path: a directory on a local disk")


def check(asked: Any) -> None:
    """The places and `ring_bytes` of an `Offload`, or of what has them too. Raises ConfigError for an unknown one."""
    for kind, possible in PLACES.items():
        place = getattr(asked, kind)
        if place is not None and place not in possible:
            *others, last = (repr(name) for name in (None, *possible))
            raise ConfigError(f"offload.{kind}={place!r}: {', '.join(others)} or {last}")
    ring = asked.ring_bytes
    if ring is not None and (isinstance(ring, bool) or not isinstance(ring, int) or ring < 1):
        raise ConfigError(f"offload.ring_bytes={ring!r}: a number of bytes, at least 1")


ALL_ON_HOST = Offload(params="cpu", optimizer="cpu", gradients="cpu")
"""What FSDP's CPU offload means."""

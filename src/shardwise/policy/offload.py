"""What rests elsewhere than on the device, as data."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ConfigError

PLACES = {"params": ("cpu", "nvme"), "optimizer": ("cpu", "nvme"), "gradients": ("cpu",), "step": ("cpu",)}
"""By kind of tensor: where it may rest other than on the device; and where the optimizer may step other than there."""


@dataclass(frozen=True, slots=True)
class Offload:
    """Where the shards, optimizer state and reduced gradients of one `sw.shard` call's units rest between uses."""

    params: str | None = None
    """Where shards rest. None: on the device. "cpu": in host memory, which on CPU ranks is the same. "nvme": in a file
    of each rank in `path`. Then the device holds buffers of four times the largest unit's slice beside its slots, and
    for "nvme" the host holds as much."""
    optimizer: str | None = None
    """Where optimizer state rests. None: where the optimizer makes it, on the device. "cpu": in host memory, which on
    CPU ranks is the same. "nvme": in a file of each rank in `path`."""
    path: str | os.PathLike[str] | None = None
    """Directory for the files, on a disk of this machine. Created if missing."""
    pin: bool = True
    """Whether host memory, including that for "nvme", is pinned, so that copies do not block the host."""
    ring_bytes: int | None = None
    """Size of the ring on a rank's device through which optimizer state passes in its step; for "nvme" its host holds
    as much. None: four times the largest parameter's state, at least 64 MiB."""
    gradients: str | None = None
    """Where reduced gradients rest until the step. None: on the device. "cpu": in host memory, which on CPU ranks is
    the same; then the device holds buffers of four times the largest unit's slice. Without effect where the optimizer
    steps in backward."""
    step: str | None = None
    """Which processor takes the optimizer's step. None: the device, to which everything offloaded is copied for it.
    "cpu": the host, with this rank's share of its cores and torch's fused kernels; then state never leaves the host,
    nor do weights and gradients that rest in its memory. Needs `optimizer`. On CPU ranks it is the same."""

    def __post_init__(self) -> None:
        check(self)
        for kind in PLACES:
            if getattr(self, kind) == "nvme" and self.path is None:
                raise ConfigError(f"offload.{kind}='nvme' needs offload.path: set it to a directory on a local disk")


def check(asked: Any) -> None:
    """Check the places and `ring_bytes` of an `Offload` or an object with the same fields. Raises ConfigError."""
    for kind, possible in PLACES.items():
        place = getattr(asked, kind)
        if place is not None and place not in possible:
            *others, last = (repr(name) for name in (None, *possible))
            raise ConfigError(f"offload.{kind}={place!r}: must be {', '.join(others)} or {last}")
    if asked.step is not None and asked.optimizer is None:
        raise ConfigError(
            f"offload.step={asked.step!r} steps with state that rests on the host: set offload.optimizer='cpu' (or "
            "'nvme') as well, or leave offload.step out"
        )
    ring = asked.ring_bytes
    if ring is not None and (isinstance(ring, bool) or not isinstance(ring, int) or ring < 1):
        raise ConfigError(f"offload.ring_bytes={ring!r}: must be a number of bytes, at least 1")


ALL_ON_HOST = Offload(params="cpu", optimizer="cpu", gradients="cpu")
"""The equivalent of FSDP's CPU offload."""

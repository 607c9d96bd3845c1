"""The stores of one `sw.shard` call, for optimizer state, weights and gradients that do not stay on the device; and its
optimizers' step on the host."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from shardwise import accelerators
from shardwise.offload.host_step import HostStep
from shardwise.offload.media.disk import Disk
from shardwise.offload.media.host_memory import HostMemory
from shardwise.offload.media.medium import Medium
from shardwise.offload.media.staged_disk import THREADS, StagedDisk
from shardwise.offload.shard_store import ShardStore
from shardwise.offload.slice_home import SliceHome
from shardwise.offload.state_store import StateStore
from shardwise.policy.offload import Offload


class Stores(NamedTuple):
    """The stores of one `sw.shard` call. Each is None if its tensors stay on the device."""

    states: StateStore | None = None
    shards: ShardStore | None = None
    gradients: ShardStore | None = None
    host_step: HostStep | None = None
    """Takes optimizers' steps on the host. None: the device does."""

    @classmethod
    def of(cls, offload: Offload | None, device: torch.device) -> Stores:
        """Make the stores that `offload` asks for, without allocating anything yet."""
        if offload is None:
            return cls()

        is_apart = accelerators.has_memory(device)

        def medium(place: str | None, what: str, reaches_device: bool = is_apart) -> Medium | None:
            if place == "nvme":
                assert offload.path is not None
                if reaches_device:
                    return StagedDisk(Disk(Path(offload.path), what, THREADS), device, what, offload.pin)
                return Disk(Path(offload.path), what)
            return HostMemory(device, what, offload.pin) if place == "cpu" and reaches_device else None

        host_step = HostStep(device, offload.pin) if offload.step == "cpu" and is_apart else None
        shards, gradients = medium(offload.params, "weights"), medium(offload.gradients, "gradients")
        states = medium(offload.optimizer, "optimizer state", reaches_device=is_apart and host_step is None)
        return cls(
            None if states is None else StateStore(states, offload.ring_bytes, host_step),
            None if shards is None else ShardStore(shards),
            None if gradients is None else ShardStore(gradients, host_step is not None),
            host_step,
        )

    def home_of_shard(self, numel: int, dtype: torch.dtype) -> SliceHome | None:
        """Return a home for a new slice of weights, or None if it stays in memory or is empty."""
        return None if self.shards is None or not numel else SliceHome(self.shards, numel, dtype)

    @property
    def of_slices(self) -> list[ShardStore]:
        """The stores of slices, in which each group has its own home: weights and gradients."""
        return [store for store in (self.shards, self.gradients) if store is not None]


ON_DEVICE = Stores()
"""No stores: everything stays on the device."""

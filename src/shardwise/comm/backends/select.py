"""Which implementation of the collectives a process group gets: more of them than torch's own, and users may choose."""

from __future__ import annotations

import os
import platform

import torch
import torch.distributed as dist

from shardwise.comm.backends.gloo import GlooCollectives
from shardwise.comm.backends.tree_channel import channel_of
from shardwise.comm.torch_channels import ChannelCollectives, ChannelStreams
from shardwise.errors import ConfigError
from shardwise.fsdp.collectives import Collectives
from shardwise.fsdp.torch_collectives import DryCollectives

CHOICES = ("streams", "gloo", "shm", "dry", "torch")


def choose(group: dist.ProcessGroup | None, device: torch.device) -> Collectives | None:
    """Return the collectives for a group's ranks; None if they need none. Every rank of the group must call this.

    Returns:
        streams on accelerators; on CPUs shm if all ranks can share memory, else gloo; None for a world of one and under
        torch's `fake` process group. `SHARDWISE_COLLECTIVES` overrides this for larger worlds.
        `SHARDWISE_SEPARATE_REDUCTIONS=1` gives streams a second communicator for reductions, so that they and gathers
        do not queue behind one another, at the cost of a second set of the communicator's buffers.

    Raises:
        ConfigError: `SHARDWISE_COLLECTIVES` names none of these, or one that is not possible here; or
            `SHARDWISE_SEPARATE_REDUCTIONS` is neither 0 nor 1.
    """
    asked = os.environ.get("SHARDWISE_COLLECTIVES", "")
    if asked and asked not in CHOICES:
        raise ConfigError(f"SHARDWISE_COLLECTIVES={asked!r}: choose one of {', '.join(CHOICES)}")
    if group is None or group.size() == 1 or dist.get_backend(group) == "fake":
        return None
    if asked == "dry":
        return DryCollectives(group.rank(), group.size(), device)
    if asked and (asked == "streams") != (device.type != "cpu"):
        raise ConfigError(f"SHARDWISE_COLLECTIVES={asked!r} cannot be used for ranks on {device.type}; leave it out")
    if device.type != "cpu":
        return ChannelStreams(group, device, _separate_reductions(), channel=channel_of)
    if asked == "torch":
        return ChannelCollectives(group)
    return GlooCollectives(group) if asked == "gloo" else _on_cpus(group, must_share=asked == "shm")


def _separate_reductions() -> bool:
    asked = os.environ.get("SHARDWISE_SEPARATE_REDUCTIONS", "0")
    if asked not in {"0", "1"}:
        raise ConfigError(f"SHARDWISE_SEPARATE_REDUCTIONS={asked!r}: must be 0 or 1")
    return asked == "1"


def _on_cpus(group: dist.ProcessGroup, must_share: bool) -> Collectives:
    # Ranks decide together: first whether all of them support shm, then (in the constructor) whether it works.
    from shardwise.comm.backends.shared_memory.segment import exchange

    suitable = platform.system() == "Linux" and platform.machine() == "x86_64"
    if all(able for (able,) in exchange(group, [suitable])):
        from shardwise.comm.backends.shared_memory.collectives import ShmCollectives

        try:
            return ShmCollectives(group)
        except OSError as error:
            if must_share:
                raise ConfigError(f"SHARDWISE_COLLECTIVES='shm' does not work here: {error}") from error
    elif must_share:
        raise ConfigError("SHARDWISE_COLLECTIVES='shm' needs x86-64 Linux on every rank")
    return GlooCollectives(group)

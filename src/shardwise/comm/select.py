"""Which implementation of the collectives a process group gets."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.comm.dry import DryCollectives
from shardwise.comm.on_streams import StreamCollectives
from shardwise.comm.protocol import Collectives
from shardwise.comm.torch_collectives import TorchCollectives
from shardwise.registry import registered

SEAM = "collectives"
"""Functions that are asked first: (group, device) -> Collectives | None. Every rank of the group calls them."""


def collectives_for(group: dist.ProcessGroup | None, device: torch.device | str) -> Collectives:
    """Return the collectives for a group's ranks. Every rank of the group must call this.

    Args:
        group: None means the default group, or a world of one if torch.distributed is not initialised.
        device: the device of this rank's buffers.

    Returns:
        What the first registered function returns that returns any; else dry ones for a world of one and under torch's
        `fake` process group, and torch's own for others: on streams for an accelerator.
    """
    device = torch.device(device)
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    for choose in registered(SEAM):
        found: Collectives | None = choose(group, device)
        if found is not None:
            return found
    if group is None:
        return DryCollectives(0, 1, device)
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return DryCollectives(group.rank(), group.size(), device)
    return TorchCollectives(group) if device.type == "cpu" else StreamCollectives(group, device)

"""The places in which parameters, gradients and optimizer state can rest, as `shardwise plan --offload` writes them."""

from __future__ import annotations

import shardwise as sw
from tests.offload.rig import LEAST, shared_folder

IN_HOST_MEMORY = ("params=cpu", "optimizer=cpu", "params=cpu,optimizer=cpu")
ON_A_DISK = ("params=nvme", "optimizer=nvme", "params=nvme,optimizer=nvme")
ON_DISK = (*ON_A_DISK, "params=cpu,optimizer=nvme", "params=nvme,optimizer=cpu")
GRADIENTS = (
    "gradients=cpu",
    "params=cpu,gradients=cpu",
    "optimizer=cpu,gradients=cpu",
    "params=cpu,optimizer=cpu,gradients=cpu",
)
GRADIENTS_BESIDE_A_DISK = (
    "params=nvme,gradients=cpu",
    "optimizer=nvme,gradients=cpu",
    "params=cpu,optimizer=nvme,gradients=cpu",
)
HOST_STEP = (
    "optimizer=cpu,step=cpu",
    "params=cpu,optimizer=cpu,step=cpu",
    "optimizer=cpu,gradients=cpu,step=cpu",
    "params=cpu,optimizer=cpu,gradients=cpu,step=cpu",
)
HOST_STEP_FROM_DISK = (
    "optimizer=nvme,step=cpu",
    "params=nvme,optimizer=nvme,step=cpu",
    "params=cpu,optimizer=nvme,gradients=cpu,step=cpu",
)
EVERY = (*IN_HOST_MEMORY, *ON_DISK, *GRADIENTS, *GRADIENTS_BESIDE_A_DISK, *HOST_STEP, *HOST_STEP_FROM_DISK)


def offload(place: str) -> sw.Offload:
    """Return a place's Offload, with the least ring and a folder that all ranks share. Every rank must call this."""
    rests: dict[str, str] = dict(part.split("=") for part in place.split(","))  # type: ignore[arg-type]
    path = shared_folder() if "nvme" in rests.values() else None
    stays = rests.get("optimizer") == "cpu" and "step" in rests  # no state goes through a ring
    return sw.Offload(pin=False, path=path, ring_bytes=None if stays else LEAST, **rests)

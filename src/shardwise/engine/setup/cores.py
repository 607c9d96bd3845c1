"""Which cores of a host its ranks may run on, so that each takes its fair share of them."""

from __future__ import annotations

import os
import socket

from shardwise.comm.together import OverGroups
from shardwise.fsdp.mesh import Mesh
from shardwise.offload import host_threads


def share_cores(mesh: Mesh) -> None:
    """Learn which cores the other ranks of this host may run on. Every rank must call this; it waits for no device."""
    if mesh.is_dry:
        return
    host = socket.gethostname()
    received = OverGroups((mesh.shard, mesh.replicate)).all_gather_object(
        (host, os.getpid(), sorted(host_threads.available_cores()))
    )
    host_threads.share_with({f"{where}/{pid}": cores for where, pid, cores in received if where == host})

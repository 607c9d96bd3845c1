"""Which cores of a host its ranks may run on, so that each takes its fair share of them."""

from __future__ import annotations

import json
import os
import socket

from shardwise.engine.collective_log import merged
from shardwise.engine.mesh import Mesh
from shardwise.offload import host_threads


def share_cores(mesh: Mesh) -> None:
    """Learn which cores the other ranks of this host may run on. Every rank must call this; it waits for no device."""
    if mesh.is_dry:
        return
    host = socket.gethostname()
    message = json.dumps({f"{host}/{os.getpid()}": [host, sorted(host_threads.available_cores())]}).encode()
    for group in (mesh.shard, mesh.replicate):
        message = group.exchange(message, merged)
    ranks: dict[str, tuple[str, list[int]]] = json.loads(message)
    host_threads.share_with({name: cores for name, (where, cores) in ranks.items() if where == host})

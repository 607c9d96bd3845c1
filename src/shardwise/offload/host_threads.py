"""The threads with which a rank computes on the host."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_host() -> Iterator[None]:
    """A context in which torch computes on the host, with this rank's share of its cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(fair_share())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def available_cores() -> int:
    """Return how many cores this process may run on: fewer than the machine has, if it was bound to some."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    return bound or os.cpu_count() or 1


def fair_share() -> int:
    """Return this rank's share of the cores that it may run on, at least 1. Ranks of one host share them."""
    cores = available_cores()
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if cores < ranks:
        warnings.warn(
            f"shardwise: offload.step='cpu' has {cores} cores for the steps of {ranks} ranks, which take turns: start "
            "fewer ranks on this host, or leave offload.step out, so that the device takes the step",
            stacklevel=2,
        )
    return max(1, cores // ranks)

"""The threads with which a rank computes on the host: its share of the cores that it and other ranks may run on."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch

_neighbours: dict[str, frozenset[int]] = {}
"""The cores that each process may run on, for the processes of this host that train together; by a name of the process.
A process that is bound to cores of its own shares none of them."""


@contextmanager
def on_host() -> Iterator[None]:
    """A context in which torch computes on the host, with this rank's share of its cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(fair_share())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def available_cores() -> frozenset[int]:
    """Return the cores that this process may run on: fewer than the machine has, if it was bound to some."""
    bound = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return frozenset(bound)


def share_with(ranks: Mapping[str, Collection[int]]) -> None:
    """Note which cores the ranks of this host may run on, this one included, by a name of each process."""
    _neighbours.update((name, frozenset(cores)) for name, cores in ranks.items())


def fair_share() -> int:
    """Return this rank's share of the cores that it may run on, at least 1. Each core is shared by all ranks that may
    run on it."""
    cores = available_cores()
    share = _share(cores, tuple(_neighbours.values()))
    if share < 1:
        ranks = sum(bool(theirs & cores) for theirs in _neighbours.values())
        warnings.warn(
            f"shardwise: offload.step='cpu' has {len(cores)} cores for the steps of {ranks} ranks, which take turns: "
            "start fewer ranks on this host, or leave offload.step out, so that the device takes the step",
            stacklevel=2,
        )
    return max(1, int(share))


@cache
def _share(cores: frozenset[int], ranks: tuple[frozenset[int], ...]) -> float:
    """Return how many cores are left for one of the ranks, which may run on `cores`."""
    users = Counter(core for theirs in ranks for core in theirs)
    return round(sum(1 / max(1, users[core]) for core in cores), 6)

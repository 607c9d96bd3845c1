"""This process among its peers: its rank, its device, and the few exchanges that the trainer needs."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported while there is a group, its functions' defaults would keep the group

from shardwise import accelerators, device_tools
from shardwise.comm.backends.tree_channel import TreeChannel, channel_of
from shardwise.errors import MeshError
from shardwise.together import Combine, Together
from shardwise.train.process.interruption import Interrupted

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks(Together):
    """This process's place in a run. Its exchanges go between hosts and wait for no device."""

    rank: int
    world_size: int
    device: torch.device
    per_batch: int = 1
    """Number of consecutive ranks that work on the same batch."""
    per_slice: int = 1
    """Number of consecutive ranks, of those, that work on the same tokens of it: a tensor-parallel group."""
    _channels: list[TreeChannel] = field(default_factory=list, init=False, repr=False, compare=False)
    """Empty until the first exchange, then one channel. A list, because the class is frozen."""

    @property
    def data_ranks(self) -> int:
        """Number of different batches that are worked on at once."""
        return self.world_size // self.per_batch

    @property
    def data_rank(self) -> int:
        """Number of the batch, of those, that this rank works on."""
        return self.rank // self.per_batch

    @property
    def token_ranks(self) -> int:
        """Number of ranks with tokens of their own: those over which the engine averages gradients."""
        return self.world_size // self.per_slice

    @property
    def slices(self) -> int:
        """Number of slices that a batch's sequences are divided into."""
        return self.per_batch // self.per_slice

    @property
    def own_slice(self) -> int:
        """Number of the slice, of those, that this rank works on."""
        return self.rank // self.per_slice % self.slices

    @property
    def per_host(self) -> int:
        """Number of ranks on this host, as torchrun says; without it, of all."""
        return min(int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)), self.world_size)

    @property
    def crosses_hosts(self) -> bool:
        """Whether ranks that work on the same tokens are on different hosts."""
        return self.per_host % self.per_slice != 0

    @property
    def counts(self) -> int:
        """1 on the first of the ranks that work on the same tokens, else 0: multiplied by it, tokens' numbers are added
        once."""
        return int(self.rank % self.per_slice == 0)

    def sum(self, values: Sequence[float], dtype: type[np.generic] = np.float64) -> list[float]:
        """Return elementwise sums over all ranks, the same on every rank. Every rank must call this.

        Args:
            values: local numbers, as many on every rank.
            dtype: float64 or, for counts, int64.
        """

        def add(left: bytes, right: bytes) -> bytes:
            return (np.frombuffer(left, dtype) + np.frombuffer(right, dtype)).tobytes()

        total: list[float] = np.frombuffer(self.exchange(np.array(values, dtype).tobytes(), add), dtype).tolist()
        return total

    def count(self, local: int) -> int:
        """Return the sum of an integer over all ranks. Every rank must call this."""
        return int(self.sum([local], np.int64)[0])

    @property
    def channels(self) -> tuple[TreeChannel, ...]:
        """What exchanges go over: nothing before the first one, nor for a rank alone."""
        return tuple(self._channels)

    def exchange(self, message: bytes, combine: Combine) -> bytes:
        """Exchange over a channel of the run's own."""
        if self.world_size == 1:
            return message
        if not self._channels:
            world = dist.group.WORLD
            assert world is not None
            self._channels.append(channel_of(world, {}))
        return self._channels[0].exchange(message, combine)


@contextmanager
def started(per_batch: int = 1, per_slice: int = 1) -> Iterator[Ranks]:
    """Join the other ranks for the duration of a run, as torchrun's environment says; without it, run as one rank.

    Uses the backend made for this rank's device: nccl for a GPU, gloo for a CPU. Every rank must enter. An existing
    process group is used and not destroyed. A group initialised here is destroyed when all ranks leave the block, or
    end together with `Interrupted`. After any other exception it is kept: destroying a communicator waits for ranks
    that may never arrive, which would delay the error. The caller that catches the exception must report it and end the
    process.

    Args:
        per_batch, per_slice: as those of `Ranks`.

    Raises:
        MeshError: two ranks of one host have the same accelerator. Raised on every rank.
    """
    device = device_here()
    launched = "RANK" in os.environ and not dist.is_initialized()
    if launched:
        dist.init_process_group(accelerators.backend_for(device))
    joined = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
    ranks = Ranks(rank, world_size, device, per_batch, per_slice)
    _refuse_shared_device(ranks)
    try:
        yield ranks
    except Interrupted:
        if launched:
            _part()
        raise
    if launched:
        _part()


def _refuse_shared_device(ranks: Ranks) -> None:
    """Raise MeshError if two ranks share a device. Every rank must call this. If each rank sees only one device, as
    schedulers arrange it, no rank can tell alone whether another rank has the same one; two ranks on one device would
    hang in the first collective, or be refused by it."""
    owners: dict[tuple[str, str], int] = {}
    for rank, (host, identity) in enumerate(
        ranks.all_gather_object((socket.gethostname(), device_tools.identity(ranks.device)))
    ):
        if identity is None:
            continue
        owner = owners.setdefault((host, identity), rank)
        if owner != rank:
            raise MeshError(
                f"ranks {owner} and {rank} have the same device, {identity} of {host}: let each rank of a host "
                "see one device of its own (CUDA_VISIBLE_DEVICES), or let all ranks see all of them"
            )


def _part() -> None:
    """Destroy the process group, as all other ranks do now too.

    A sharded model refers to its process group and to itself in cycles, hence the garbage collection. As long as
    anything refers to the group, its threads keep running, and a thread that still runs when the interpreter exits
    aborts the process: "terminate called without an active exception".
    """
    gc.collect()
    dist.destroy_process_group()


def device_here() -> torch.device:
    """Return this process's accelerator, which becomes the current device, or else the CPU."""
    return device_tools.of_local_rank(int(os.environ.get("LOCAL_RANK", "0")))

"""This process among its peers: who it is, which device it has, and the few sums that the trainer needs."""

from __future__ import annotations

import gc
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported while there is a group, its functions' defaults would keep the group

from shardwise import accelerators
from shardwise.comm.channel import Channel, channel_of
from shardwise.comm.protocol import Combine
from shardwise.comm.timeout import timeout_s
from shardwise.errors import MeshError
from shardwise.together import fail_together
from shardwise.train.process.interruption import Interrupted

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process's place in a run. Exchanges go from host to host: no device is waited for."""

    rank: int
    world_size: int
    device: torch.device
    _channels: list[Channel] = field(default_factory=list, init=False, repr=False, compare=False)
    """One, from the first exchange on."""

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and talks to the terminal."""
        return self.rank == 0

    def sum(self, values: Sequence[float], dtype: type[np.generic] = np.float64) -> list[float]:
        """Elementwise sums over all ranks, the same numbers everywhere. Every rank must call this.

        Args:
            values: local numbers, equally many on every rank.
            dtype: float64 or, for counts, int64.
        """

        def add(left: bytes, right: bytes) -> bytes:
            return (np.frombuffer(left, dtype) + np.frombuffer(right, dtype)).tobytes()

        total: list[float] = np.frombuffer(self._exchange(np.array(values, dtype).tobytes(), add), dtype).tolist()
        return total

    def count(self, local: int) -> int:
        """The sum of an integer over all ranks. Every rank must call this."""
        return int(self.sum([local], np.int64)[0])

    def hear(self, own: T) -> list[T]:
        """One small picklable object of every rank, in rank order, on every rank. Every rank must call this."""

        def both(left: bytes, right: bytes) -> bytes:
            return pickle.dumps(pickle.loads(left) | pickle.loads(right))

        said: dict[int, T] = pickle.loads(self._exchange(pickle.dumps({self.rank: own}), both))
        return [said[rank] for rank in sorted(said)]

    def _exchange(self, message: bytes, combine: Combine) -> bytes:
        if self.world_size == 1:
            return message
        if not self._channels:
            world = dist.group.WORLD
            assert world is not None
            self._channels.append(channel_of(world, timeout_s(world), {}))
        return self._channels[0].exchange(message, combine)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Either all ranks exit the block or all raise: the failing rank its own error, the others a PeerError.

        Every rank must enter. No collective may be inside.
        """

        def tell(failure: str | None) -> str | None:
            failures = self.hear(failure)
            return next((f"rank {rank} failed: {text}" for rank, text in enumerate(failures) if text is not None), None)

        with fail_together(tell):
            yield

    def on_first(self, task: Callable[[], T]) -> T:
        """Run a task on rank 0 alone and return its result, small and picklable, on every rank.

        Every rank must call this. If the task raises, all ranks raise, as in `together`.
        """
        results: list[T] = []
        with self.together():
            if self.is_first:
                results.append(task())
        return self.hear(results)[0][0]


@contextmanager
def started() -> Iterator[Ranks]:
    """Join the other ranks for the length of a run, as torchrun's environment says; alone without one.

    Uses the backend that is made for this rank's device: nccl for a GPU, gloo for a CPU. Every rank must enter. A
    process group that exists already is used and left alone; one that was made here is destroyed when all ranks are
    through, or end together as an `Interrupted` says. After any other exception it stays as it is: to tear a
    communicator down waits for ranks that may never come, and the error would wait with it. Whoever catches that
    exception reports it, then ends the process.

    Raises:
        MeshError: two ranks of one host have the same accelerator. On every rank.
    """
    device = device_here()
    launched = "RANK" in os.environ and not dist.is_initialized()
    if launched:
        dist.init_process_group(accelerators.backend_for(device))
    joined = dist.is_initialized()
    ranks = Ranks(dist.get_rank() if joined else 0, dist.get_world_size() if joined else 1, device)
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
    """Every rank must call this. Where each rank sees one device only, as schedulers arrange it, no rank can tell by
    itself whether it is one of its own; two on one would hang in, or be refused by, the first collective."""
    owners: dict[tuple[str, str], int] = {}
    for rank, (host, identity) in enumerate(ranks.hear((socket.gethostname(), accelerators.identity(ranks.device)))):
        if identity is None:
            continue
        owner = owners.setdefault((host, identity), rank)
        if owner != rank:
            raise MeshError(
                f"ranks {owner} and {rank} have the same device, {identity} of {host}: have each rank of a host see "
                "one of its own (CUDA_VISIBLE_DEVICES), or all ranks see all of them"
            )


def _part() -> None:
    """Leave the other ranks, which leave too.

    A sharded model holds its process group, and itself in cycles. While anything holds the group its threads run on,
    and one that meets the interpreter's end aborts the process: "terminate called without an active exception".
    """
    gc.collect()
    dist.destroy_process_group()


def device_here() -> torch.device:
    """This process's accelerator, which becomes the current one, or else the CPU."""
    return accelerators.of_local_rank(int(os.environ.get("LOCAL_RANK", "0")))

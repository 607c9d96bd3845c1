"""Counters by which the ranks of one host tell each other how far they are.

A counter is one monotone int64 per rank, each alone in its cache line, written by its rank and watched by the others.
On x86-64 a store is never seen before an earlier store or load of the same core, so whatever a rank wrote (or read)
before it posted is over for whoever sees the post. Other processors would need fences that Python cannot issue.
"""

from __future__ import annotations

import functools
import os
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.comm.segment import LINE_BYTES, exchange
from shardwise.errors import CollectiveTimeout, MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

_WORDS = LINE_BYTES // 8
_SPINS = 64
_YIELD_S = 300e-6
_LONGEST_SLEEP_S = 1e-3
_LOOK_EVERY_S = 0.05


class Watch:
    """Waiting for peers without waiting forever: gives up on time, and at once if a peer's process is gone."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        """Every rank must call this."""
        self.rank = group.rank()
        self._timeout_s = timeout_s
        self._births = [(pid, born) for pid, born in exchange(group, [os.getpid(), birth(os.getpid())])]

    def until(self, ready: Callable[[], bool], peer: int, op: str) -> None:
        """Return when `ready()`.

        Raises:
            CollectiveTimeout: `peer` was not ready in time, or any process of the group is gone.
        """
        start = time.perf_counter()
        look, spins = start + _LOOK_EVERY_S, 0
        while not ready():
            spins += 1
            if spins < _SPINS:
                continue
            now = time.perf_counter()
            if now - start < _YIELD_S:
                os.sched_yield()
            else:  # a late peer may need this core; the delay stays a fraction of what was waited anyway
                time.sleep(min((now - start) / 8, _LONGEST_SLEEP_S))
            if now > look:
                look = now + _LOOK_EVERY_S
                self._look(ready, peer, op, now - start)

    def _look(self, ready: Callable[[], bool], peer: int, op: str, waited_s: float) -> None:
        gone = [rank for rank, (pid, born) in enumerate(self._births) if birth(pid) != born]
        if gone and not ready():  # it may have posted before it left
            raise CollectiveTimeout(f"{op} on rank {self.rank}: the process of rank {gone[0]} is gone.")
        if waited_s > self._timeout_s:
            raise CollectiveTimeout(
                f"{op} on rank {self.rank}: rank {peer} did not arrive in {self._timeout_s:g} s. It hangs, or it is at "
                "another collective. SHARDWISE_TIMEOUT_S sets how long to wait."
            )


class Counter:
    """How often each rank has done one thing. Posting carries a signature of what was done, which waiting compares."""

    def __init__(self, head: memoryview, position: int, world_size: int, watch: Watch) -> None:
        """The `position`-th counter in a segment's head; each takes `world_size` lines."""
        words = [(position * world_size + rank) * _WORDS for rank in range(world_size)]
        self._head = head
        self._own = words[watch.rank]
        self._peers = [(rank, word) for rank, word in enumerate(words) if rank != watch.rank]
        self._watch = watch

    def post(self, value: int, signature: int = 0) -> None:
        # A peer may be one post behind, so the last two signatures are kept. The counter is stored last.
        self._head[self._own + 1 + value % 2] = signature
        self._head[self._own] = value

    def reached(self, value: int) -> bool:
        """Whether every rank has posted `value`."""
        return all(self._head[word] >= value for _, word in self._peers)

    def wait(self, value: int, op: str, signature: int = 0) -> None:
        """Return when every rank has posted `value`, having met the same signature.

        Raises:
            CollectiveTimeout: a rank did not come.
            MismatchError: a rank came with another signature.
        """
        head = self._head
        for peer, word in self._peers:
            if head[word] < value:
                self._watch.until(lambda word=word: head[word] >= value, peer, op)  # type: ignore[misc]
            if signature and head[word + 1 + value % 2] != signature:
                raise MismatchError(
                    f"rank {peer} is at another collective than rank {self._watch.rank}, which is at {op} "
                    "(or at the same with other sizes or dtypes)."
                )


@functools.lru_cache(4096)
def sign(*description: object) -> int:
    """A nonzero number that tells collectives apart."""
    return zlib.crc32(repr(description).encode()) + 1


def birth(pid: int) -> int:
    """When a process started, in clock ticks since boot; -1 if it is gone or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])

"""Counters by which the ranks of one host tell each other how far they are.

A counter is one monotone int64 per rank, each alone in its cache line, written by its rank and watched by the others.
On x86-64 a store is never seen before an earlier store or load of the same core, so whatever a rank wrote (or read)
before it posted is over for every rank that sees the post. Other processors would need fences that Python cannot issue.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from shardwise.comm.backends.shared_memory.segment import LINE_BYTES, exchange
from shardwise.comm.signature import in_words, mismatch
from shardwise.errors import CollectiveTimeout, ShardwiseError
from shardwise.liveness import birth

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch.distributed as dist

_WORDS = LINE_BYTES // 8
_SPINS = 64
_YIELD_S = 300e-6
_LONGEST_SLEEP_S = 1e-3
_LOOK_EVERY_S = 0.05
_KEPT = 256
"""Entries of a journal."""
JOURNAL_LINES = 1 + _KEPT // _WORDS
"""Cache lines of one rank's journal: how many entries there have been, and the last ones."""


class Watch:
    """Waiting for peers without waiting forever: gives up on time, and at once if a peer's process is gone."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        """Every rank must call this."""
        self.rank = group.rank()
        self.labels: Mapping[int, str] = {}
        """What labels mean, for errors."""
        self.journal: Journal | None = None
        """Looked into while a peer is late."""
        self._timeout_s = timeout_s
        self._failure: ShardwiseError | None = None
        """What ended the first wait that failed."""
        self.births = [(pid, born) for pid, born in exchange(group, [os.getpid(), birth(os.getpid())])]

    def fail(self, error: ShardwiseError) -> ShardwiseError:
        """Remember that the ranks are out of step: no later wait is worth its time. Returns the error, to be raised."""
        self._failure = type(error)(*error.args)  # not the error itself: its traceback would keep the model
        return error

    def until(self, ready: Callable[[], bool], peer: int, op: str | int) -> None:
        """Return when `ready()`. `op`: what for, in words or as a signature.

        Raises:
            CollectiveTimeout: `peer` was not ready in time, or any process of the group is gone.
            MismatchError: a rank did other things than this one.
        """
        if self._failure is not None and not ready():
            raise type(self._failure)(*self._failure.args)
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

    def _look(self, ready: Callable[[], bool], peer: int, op: str | int, waited_s: float) -> None:
        what = op if isinstance(op, str) else in_words(op, self.labels)
        if self.journal is not None:  # first: who found out before may be gone by now
            difference = self.journal.difference()
            if difference is not None:
                raise self.fail(difference)
        gone = [rank for rank, (pid, born) in enumerate(self.births) if birth(pid) != born]
        if gone and not ready():  # it may have posted before it left
            raise self.fail(CollectiveTimeout(f"{what} on rank {self.rank}: the process of rank {gone[0]} is gone."))
        if waited_s > self._timeout_s:
            raise self.fail(
                CollectiveTimeout(
                    f"{what} on rank {self.rank}: rank {peer} did not arrive in {self._timeout_s:g} s: it hangs, or "
                    "does something else. SHARDWISE_TIMEOUT_S sets how long to wait."
                )
            )


class Counter:
    """How often each rank has done one thing. Posting carries a signature of the call, which waiting compares."""

    def __init__(self, head: memoryview, position: int, world_size: int, watch: Watch) -> None:
        """The `position`-th counter in a segment's head; each takes `world_size` lines."""
        words = [(position * world_size + rank) * _WORDS for rank in range(world_size)]
        self._head = head
        self._own = words[watch.rank]
        self._peers = [(rank, word) for rank, word in enumerate(words) if rank != watch.rank]
        self._watch = watch

    def post(self, value: int, signature: int = 0) -> None:
        """This rank has done it `value` times. No communication."""
        # A peer may be one post behind, so the last two signatures are kept. The counter is stored last.
        self._head[self._own + 1 + value % 2] = signature
        self._head[self._own] = value

    def reached(self, value: int) -> bool:
        """Whether every rank has posted `value`."""
        return all(self._head[word] >= value for _, word in self._peers)

    def wait(self, value: int, op: str | int) -> None:
        """Return when every rank has posted `value`; with the same signature, where `op` is one and not words.

        Raises:
            CollectiveTimeout: a rank did not come.
            MismatchError: a rank came with another signature, or does something else.
        """
        head = self._head
        for peer, word in self._peers:
            if head[word] < value:
                self._watch.until(lambda word=word: head[word] >= value, peer, op)  # type: ignore[misc]
            if type(op) is int and head[word + 1 + value % 2] != op:
                theirs = head[word + 1 + value % 2]
                raise self._watch.fail(mismatch(self._watch.rank, op, peer, theirs, self._watch.labels))


class Journal:
    """The last things that each rank did which all must do alike, in their order.

    Ranks that wait for one another at different things would wait for ever; who waits for long looks here.
    """

    def __init__(
        self, head: memoryview, first_line: int, rank: int, world_size: int, labels: Mapping[int, str]
    ) -> None:
        """From a segment's line `first_line` on; it takes JOURNAL_LINES for each rank."""
        self._head = head
        self._first = first_line * _WORDS
        self._rank = rank
        self._world_size = world_size
        self._labels = labels
        self._count = 0

    def write(self, signature: int) -> None:
        """Note a call of this rank by its signature. No communication."""
        start = self._start(self._rank)
        self._head[start + _WORDS + self._count % _KEPT] = signature
        self._count += 1
        self._head[start] = self._count

    def difference(self) -> ShardwiseError | None:
        """The error about a peer that did something else where both have been, or None. No communication."""
        own = self._start(self._rank) + _WORDS
        for peer in range(self._world_size):
            theirs = self._start(peer) + _WORDS
            counts = self._count, self._head[theirs - _WORDS]
            # Whoever is ahead, perhaps by many posts that need no wait, has written over its oldest entries, and the
            # peer may be writing more meanwhile.
            first = max(0, min(counts) - _KEPT // 2, max(counts) - _KEPT // 2)
            for position in range(first, min(counts)):
                mine, other = (self._head[start + position % _KEPT] for start in (own, theirs))
                if mine != other:
                    return mismatch(self._rank, mine, peer, other, self._labels)
        return None

    def _start(self, rank: int) -> int:
        return self._first + rank * JOURNAL_LINES * _WORDS

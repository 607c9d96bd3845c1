"""Counters in shared memory by which the ranks of one host tell each other how far they are.

A counter is one monotone int64 for each rank, alone in its cache line, written by its rank and watched by the others.
On x86-64 a store never becomes visible before an earlier store or load of the same core. So when a rank sees a post,
everything that the posting rank wrote or read before it is complete. Other processors would need memory fences, which
Python cannot issue.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from shardwise.comm.backends.shared_memory.segment import LINE_BYTES, exchange
from shardwise.comm.backends.signature import Reasons, in_words, mismatch, sign
from shardwise.errors import CollectiveTimeout, ShardwiseError
from shardwise.liveness import birth, ending

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch.distributed as dist

_WORDS = LINE_BYTES // 8
_SPINS = 64
_YIELD_S = 300e-6
_LONGEST_SLEEP_S = 1e-3
_LOOK_EVERY_S = 0.05
_KEPT = 256
"""Number of entries that a journal keeps."""
JOURNAL_LINES = 1 + _KEPT // _WORDS
"""Cache lines of one rank's journal: the number of entries so far, and the last `_KEPT` of them."""


class Watch:
    """Waits for peers, but not forever: until a timeout, or until a peer's process has ended."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, labels: Mapping[int, str]) -> None:
        """Every rank must call this. `labels`: in words, for error messages."""
        self.rank = group.rank()
        self.labels = labels
        self.reasons = Reasons(group)
        self.journal: Journal | None = None
        """Compared with the peers' journals while a peer is late. None until it is set."""
        self._timeout_s = timeout_s
        self._failure: ShardwiseError | None = None
        """The error of the first wait that failed, or None."""
        self.births = [(pid, born) for pid, born in exchange(group, [os.getpid(), birth(os.getpid())])]

    @property
    def has_failed(self) -> bool:
        """Whether a wait failed, so that this rank takes part in nothing any more."""
        return self._failure is not None

    def fail(self, error: ShardwiseError) -> ShardwiseError:
        """Remember an error that later waits raise at once, since ranks are out of step. Returns it, to be raised."""
        self._failure = type(error)(*error.args)  # not the error itself: its traceback would keep the model alive
        return error

    def mismatch(self, own: int, peer: int, theirs: int) -> ShardwiseError:
        """Return the error for a peer that came to the same point with another signature."""
        return mismatch(self.rank, own, peer, theirs, self.labels, self.reasons.of)

    def first_difference(self) -> ShardwiseError | None:
        """Return the error for the first call that a peer made otherwise, or None, as far as journals tell."""
        found = None if self.journal is None else self.journal.difference()
        return None if found is None else self.mismatch(*found)

    def until(self, ready: Callable[[], bool], peer: int, op: str | int, used_for: int = 0) -> None:
        """Wait until `ready()`. `op`: the signature of the call; its name if the journal does not have it, and then
        `used_for` is the signature of the buffer's last use.

        Raises:
            CollectiveTimeout: `peer` was not ready in time, or any process of the group has ended.
            MismatchError: a rank called other collectives than this one.
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
            else:  # a late peer may need this core; the delay is a fraction of the time waited so far
                time.sleep(min((now - start) / 8, _LONGEST_SLEEP_S))
            if now > look:
                look = now + _LOOK_EVERY_S
                self._look(ready, peer, op, used_for, now - start)

    def _look(self, ready: Callable[[], bool], peer: int, op: str | int, used_for: int, waited_s: float) -> None:
        after = f" after {in_words(used_for, self.labels)}" if used_for else ""
        what = f"{op} of a buffer{after}" if isinstance(op, str) else in_words(op, self.labels)
        difference = self.first_difference()  # first: a peer that found it before may have exited
        if difference is not None:
            raise self.fail(difference)
        if isinstance(op, str) and self.journal is not None:
            passed = self.journal.next_of(peer)
            if passed is not None and not ready():  # it does this before that call, or never
                raise self.fail(self.mismatch(sign(op), peer, passed))
        for rank, (pid, born) in enumerate(self.births):
            if birth(pid) != born and not ready():  # it may have posted before it exited
                ended = f"the process of rank {rank} {ending(pid, born)}"
                raise self.fail(CollectiveTimeout(f"{what} on rank {self.rank}: {ended}."))
        if waited_s > self._timeout_s:
            raise self.fail(
                CollectiveTimeout(
                    f"{what} on rank {self.rank}: rank {peer} did not arrive within {self._timeout_s:g} s: it hangs, "
                    "runs other code, or calls other units than this rank, as where only some ranks' batches have "
                    f"images.{self._last_calls(peer)} Every rank must call the same units in the same order. "
                    "SHARDWISE_TIMEOUT_S sets how long to wait."
                )
            )

    def _last_calls(self, peer: int) -> str:
        """Return a sentence on where this rank and a peer were last, or "" if that is not known."""
        if self.journal is None:
            return ""
        own, theirs = (in_words(self.journal.last(rank), self.labels) for rank in (self.rank, peer))
        return f" The last collective that rank {self.rank} began is {own}, rank {peer}'s is {theirs}."


class Counter:
    """How often each rank has done one thing. A post carries the signature of the call, which waiting ranks compare."""

    def __init__(self, head: memoryview, position: int, world_size: int, watch: Watch) -> None:
        """Use the `position`-th counter in a segment's head. Each takes `world_size` cache lines."""
        words = [(position * world_size + rank) * _WORDS for rank in range(world_size)]
        self._head = head
        self._own = words[watch.rank]
        self._peers = [(rank, word) for rank, word in enumerate(words) if rank != watch.rank]
        self._watch = watch

    def post(self, value: int, signature: int = 0) -> None:
        """Publish that this rank has done it `value` times. Does not wait."""
        # A peer may be one post behind, so the last two signatures are kept. The counter is stored last.
        self._head[self._own + 1 + value % 2] = signature
        self._head[self._own] = value

    def reached(self, value: int) -> bool:
        """Whether every peer has posted at least `value`."""
        return all(self._head[word] >= value for _, word in self._peers)

    def wait(self, value: int, op: str | int, used_for: int = 0) -> None:
        """Wait until every rank has posted at least `value`. `op`, `used_for`: as for `Watch.until`; peers' signatures
        are compared with `op`.

        Raises:
            CollectiveTimeout: a rank did not post in time, or its process ended.
            MismatchError: a rank posted another signature, or called another collective.
        """
        head = self._head
        for peer, word in self._peers:
            if head[word] < value:
                self._watch.until(lambda word=word: head[word] >= value, peer, op, used_for)  # type: ignore[misc]
            if type(op) is int and head[word + 1 + value % 2] != op:
                theirs = head[word + 1 + value % 2]
                raise self._watch.fail(self._watch.first_difference() or self._watch.mismatch(op, peer, theirs))


class Journal:
    """The signatures of the last calls of each rank that all ranks must make alike, in order.

    Ranks that wait for one another in different collectives would wait forever; a rank that waits long compares
    journals.
    """

    def __init__(self, head: memoryview, first_line: int, rank: int, world_size: int) -> None:
        """Use a segment's cache lines from `first_line` on: JOURNAL_LINES for each rank."""
        self._head = head
        self._first = first_line * _WORDS
        self._rank = rank
        self._world_size = world_size
        self._count = 0

    def write(self, signature: int) -> None:
        """Append the signature of a call of this rank. Does not wait."""
        start = self._start(self._rank)
        self._head[start + _WORDS + self._count % _KEPT] = signature
        self._count += 1
        self._head[start] = self._count

    def difference(self) -> tuple[int, int, int] | None:
        """Return this rank's signature, a peer, and the other signature that it made in the same place; None if all
        made the same ones where both ranks have been. Does not wait."""
        own = self._start(self._rank) + _WORDS
        for peer in range(self._world_size):
            theirs = self._start(peer) + _WORDS
            counts = self._count, self._head[theirs - _WORDS]
            # The rank ahead, perhaps by many calls that did not wait, has overwritten its oldest entries, and the peer
            # may be writing more now.
            first = max(0, min(counts) - _KEPT // 2, max(counts) - _KEPT // 2)
            for position in range(first, min(counts)):
                mine, other = (self._head[start + position % _KEPT] for start in (own, theirs))
                if mine != other:
                    return mine, peer, other
        return None

    def last(self, rank: int) -> int:
        """Return the signature of a rank's last call. Does not wait. There must be one."""
        start = self._start(rank) + _WORDS
        return self._head[start + (self._head[start - _WORDS] - 1) % _KEPT]

    def next_of(self, peer: int) -> int | None:
        """Return the signature of the call that a peer made after as many as this rank has made; None if none."""
        theirs = self._start(peer) + _WORDS
        count = self._head[theirs - _WORDS]
        return self._head[theirs + self._count % _KEPT] if count > self._count else None

    def _start(self, rank: int) -> int:
        return self._first + rank * JOURNAL_LINES * _WORDS

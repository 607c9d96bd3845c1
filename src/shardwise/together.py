"""Ranks that go on together: either all exit a block or all raise; and what they tell one another in a few bytes."""

from __future__ import annotations

import pickle
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import xxhash

from shardwise.errors import MismatchError, PeerError

T = TypeVar("T")
Combine = Callable[[bytes, bytes], bytes]
"""Combines two messages into one. Must be associative and commutative."""
_POLL_S = 0.5
"""Seconds between the exchanges of ranks of which some are still working."""
_POSITIVE_BITS = 62


class Together(ABC):
    """Ranks that do something together. Every method is collective: all ranks call it, in the same order."""

    rank: int
    world_size: int

    @abstractmethod
    def exchange(self, message: bytes, combine: Combine) -> bytes:
        """Return all ranks' messages combined, the same on every rank."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0. Not collective."""
        return self.rank == 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Either all ranks exit the block or all raise: a rank that failed its own error, the others a PeerError.

        The block must not contain collectives. Peers learn of an `Exception`, not of an interrupt.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        own = b"" if failure is None else f"{self.rank}\n{str(failure) or type(failure).__name__}".encode()
        received = self.exchange(own, _of_lowest_rank)
        if failure is not None:
            raise failure
        if received:
            rank, _, text = received.decode().partition("\n")
            raise PeerError(self._words(int(rank), text))

    def _words(self, rank: int, text: str) -> str:
        """Return the message for ranks that did not fail. Not collective."""
        return f"rank {rank} failed: {text}"

    def on_first(self, task: Callable[[], T]) -> T:
        """Run a task on rank 0 only and return its result, which must be small and picklable, on every rank. If the
        task raises, all ranks raise, as in `together`."""
        results: list[T] = []
        with self.together():
            if self.is_first:
                results.append(task())
        return self.from_first(results)[0]

    def from_first(self, own: T) -> T:
        """Return what rank 0 gives, which must be small and picklable."""
        received: T = pickle.loads(self.exchange(pickle.dumps(own) if self.is_first else b"", lambda a, b: a or b))
        return received

    def all_gather_object(self, own: T) -> list[T]:
        """Return one object from every rank, in rank order; small and picklable."""

        def both(left: bytes, right: bytes) -> bytes:
            return pickle.dumps(pickle.loads(left) | pickle.loads(right))

        received: dict[int, T] = pickle.loads(self.exchange(pickle.dumps({self.rank: own}), both))
        return [received[rank] for rank in sorted(received)]

    def any(self, own: bool) -> bool:
        """Return whether `own` is true on any rank."""
        return self.exchange(bytes([own]), max) != b"\0"

    def work(self, task: Callable[[], T]) -> T:
        """Run a task, such as a download, for which other ranks may wait longer than they would in a collective.

        The task, this rank's own and without collectives, runs in a thread, while the caller meets the other ranks
        about twice a second. All return when every task has ended, each with its own result; all raise soon after one
        has failed, as in `together`, although the tasks of others then still run, until their processes end.
        """
        if self.world_size == 1:
            return task()  # in this thread, so that an interrupt reaches it
        results: list[T] = []
        failures: list[Exception] = []

        def work() -> None:
            try:
                results.append(task())
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=work, name="shardwise-work", daemon=True)
        thread.start()
        while True:
            thread.join(_POLL_S)
            is_working = thread.is_alive()
            with self.together():
                if failures:
                    raise failures[0]
            if not self.any(is_working):
                return results[0]

    def agree(self, text: str, otherwise: str) -> None:
        """Raise MismatchError with the message `otherwise` on every rank unless all ranks give the same text."""
        digest = xxhash.xxh3_64_intdigest(text.encode()) >> (64 - _POSITIVE_BITS)
        if not self.equal_on_all_ranks([digest])[0]:
            raise MismatchError(otherwise)

    def equal_on_all_ranks(self, numbers: list[int]) -> list[bool]:
        """Return, for each number in [0, 2^62), whether it is the same on every rank. All ranks pass equally many."""
        own = np.array([numbers, [-number for number in numbers]], np.int64)

        def highest(left: bytes, right: bytes) -> bytes:
            return np.maximum(np.frombuffer(left, np.int64), np.frombuffer(right, np.int64)).tobytes()

        most, least = np.frombuffer(self.exchange(own.tobytes(), highest), np.int64).reshape(own.shape)
        equal: list[bool] = (most == -least).tolist()
        return equal


def _of_lowest_rank(left: bytes, right: bytes) -> bytes:
    """Return the message of the lowest rank that failed; empty if neither did."""
    if not left or not right:
        return left or right
    return min(left, right, key=lambda report: int(report.partition(b"\n")[0]))

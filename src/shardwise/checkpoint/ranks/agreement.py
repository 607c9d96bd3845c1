"""Agreement between the processes of one save or load, a few bytes at a time. No torch.

It needs one collective, the elementwise maximum of a few numbers: torch's ranks implement it in `consensus`, JAX's
processes in `shardwise.jax`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import xxhash

from shardwise.checkpoint.io.storage import Location
from shardwise.checkpoint.ranks import save_thread
from shardwise.errors import CheckpointError, MismatchError
from shardwise.hub import fetch_together, hub_name, may_be_name
from shardwise.together import fail_together, work_together

_TEXT_BYTES = 3584
"""Most bytes of an error's text that other ranks quote; each is sent as one int64 of a collective."""
_POSITIVE_BITS = 62


class Agreement(ABC):
    """All processes that save or load together. Every method is collective."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    @abstractmethod
    def _highest(self, numbers: list[int]) -> list[int]:
        """Return the elementwise maximum over all processes, which pass equally many numbers in [0, 2^63)."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes headers, small files and the manifest."""
        return self.rank == 0

    @contextmanager
    def together(self, doing: str, seen: Callable[[], bool] | None = None) -> Iterator[None]:
        """Either all ranks exit or all raise: the failing rank its own error, the others a PeerError quoting it.

        No collective may be inside. An OSError becomes a CheckpointError that begins with `doing`. `seen` is ignored:
        see Barrier.
        """
        with fail_together(self._tell):
            try:
                yield
            except OSError as error:
                raise CheckpointError(f"{doing}: {error}") from error

    def _tell(self, failure: str | None) -> str | None:
        """Tell other ranks this rank's failure, or None. Returns the message to raise where nothing failed; None if no
        rank failed."""
        failed = self._highest([0 if failure is None else self.rank + 1])[0] - 1
        if failed < 0:
            return None
        text = (failure or "") if failed == self.rank else ""
        return f"rank {failed} failed: {self._broadcast_text(text)}"

    def on_first(self, task: Callable[[], str]) -> str:
        """Return on every rank the short text that a task returns on rank 0. If it raises, all raise as in
        `together`."""
        said = ""
        with self.together("rank 0 failed"):
            if self.is_first:
                said = task()
        return self._broadcast_text(said)

    def work(self, task: Callable[[], object]) -> None:
        """Run a task that may take longer on some ranks than others would wait: see `work_together`."""
        if self.world_size == 1:
            task()  # in this thread, so that an interrupt reaches it
        else:
            work_together(task, self._tell, lambda own: bool(self._highest([own])[0]))

    def broadcast_from_rank0(self, number: int) -> int:
        """Return rank 0's number (not negative) on every rank."""
        return self._highest([number if self.is_first else 0])[0]

    def agree(self, text: str, otherwise: str) -> None:
        """Raise MismatchError with the message `otherwise` on every rank unless all ranks give the same text."""
        digest = xxhash.xxh3_64_intdigest(text.encode()) >> (64 - _POSITIVE_BITS)
        if not self.equal_on_all_ranks([digest])[0]:
            raise MismatchError(otherwise)

    def equal_on_all_ranks(self, numbers: list[int]) -> list[bool]:
        """Return, for each number in [0, 2^62), whether it is the same on every rank. All ranks pass equally many."""
        highest = self._highest([*numbers, *(2**_POSITIVE_BITS - number for number in numbers)])
        return [high == 2**_POSITIVE_BITS - low for high, low in zip(highest, highest[len(numbers) :], strict=False)]

    def _broadcast_text(self, text: str) -> str:
        """Return the text of the one rank whose text is not empty; only its beginning if it is long."""
        data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        return bytes(self._highest(list(data))).rstrip(b"\0").decode(errors="replace")


def wait_for_last_save(peers: Agreement) -> None:
    """Wait for the previous asynchronous save. Collective. Raises CheckpointError on every rank if it failed."""
    try:
        with peers.together("the last asynchronous save failed"):
            save_thread.wait()
    finally:
        save_thread.clean_up()


def fetched(path: Location, peers: Agreement, disagree: str) -> Location:
    """Return a path as it is, and a name of a hub as the directory in the cache, to which one process of each machine
    downloads it. Collective.

    Raises HubError in every process; MismatchError, with the message `disagree`, if processes disagree about what to
    load, because for some of them it is a path.
    """
    if not may_be_name(path):
        return path
    name = str(path)
    peers.agree(f"{hub_name(name)}", disagree)
    return path if hub_name(name) is None else fetch_together(name, repr(name), peers, weights=True)

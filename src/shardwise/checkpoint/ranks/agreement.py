"""Agreement between the processes of one save or load, a few bytes at a time. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardwise.checkpoint.io.storage import Location
from shardwise.checkpoint.ranks import save_thread
from shardwise.errors import CheckpointError
from shardwise.hub import fetch_together, hub_name, may_be_name
from shardwise.together import Together


class Agreement(Together):
    """All processes that save or load together: torch's ranks (`consensus`), or JAX's processes (`shardwise.jax`)."""

    @contextmanager
    def together(self, doing: str = "rank 0 failed", seen: Callable[[], bool] | None = None) -> Iterator[None]:
        """As in the base class. An OSError becomes a CheckpointError that begins with `doing`. `seen` is ignored: see
        Barrier."""
        with super().together():
            try:
                yield
            except OSError as error:
                raise CheckpointError(f"{doing}: {error}") from error


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

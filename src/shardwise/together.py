"""Either all ranks exit a block or all raise; and work that may take longer than any rank would wait for another."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from shardwise.errors import PeerError

T = TypeVar("T")
_POLL_S = 0.5
"""Seconds between the exchanges of ranks of which some are still working."""


@contextmanager
def fail_together(tell: Callable[[str | None], str | None]) -> Iterator[None]:
    """Let either all ranks exit the block or all raise: a rank that failed its own error, the others a PeerError.

    Every rank must enter. The block must not contain collectives. Peers hear of an `Exception`, not of an interrupt.

    Args:
        tell: a collective, called once at the end of the block. It takes the message of this rank's failure or None,
            and returns the message for ranks that did not fail, or None if no rank failed.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    of_a_peer = tell(None if failure is None else str(failure) or type(failure).__name__)
    if failure is not None:
        raise failure
    if of_a_peer is not None:
        raise PeerError(of_a_peer)


def work_together(task: Callable[[], T], tell: Callable[[str | None], str | None], on_any: Callable[[bool], bool]) -> T:
    """Run a task, such as a download, for which other ranks may wait longer than they would in a collective.

    The task runs in a thread of its own, while this one meets the other ranks about twice a second. Every rank must
    call this. All return when every task has ended, each with its own result; all raise soon after one has failed, as
    in `fail_together`, although the tasks of others then still run, until their processes end.

    Args:
        task: this rank's own; without collectives.
        tell: as in `fail_together`.
        on_any: a collective that returns whether the argument is true on any rank.
    """
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
        with fail_together(tell):
            if failures:
                raise failures[0]
        if not on_any(is_working):
            return results[0]

"""The save that goes on in a thread of this process: at most one, waited for by whatever touches checkpoints next."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from shardwise.errors import CheckpointError


class _Save:
    """A thread and how it ended. It does nothing before `go`, and nothing at all after `leave`."""

    def __init__(self, what: str, write: Callable[[], None], discard: Callable[[], None]) -> None:
        self._what = what
        self._write = write
        self.discard = discard
        self._error: BaseException | None = None
        self._wanted = False
        self._decided = threading.Event()
        # Not a daemon: the interpreter waits for it before it exits.
        self._thread = threading.Thread(target=self._run, name="shardwise-checkpoint", daemon=False)
        self._thread.start()

    def go(self) -> None:
        self._wanted = True
        self._decided.set()

    def leave(self) -> None:
        self._decided.set()
        self._thread.join()

    def _run(self) -> None:
        self._decided.wait()
        if not self._wanted:
            return
        try:
            self._write()
        except BaseException as error:
            self._error = error

    def wait(self) -> CheckpointError | None:
        """Until it has ended; what is to be raised if it failed."""
        self._thread.join()
        if self._error is None:
            return None
        failed = CheckpointError(f"the asynchronous save of {self._what} failed: {self._error}")
        failed.__cause__ = self._error
        return failed


_under_way: _Save | None = None
_discards: list[Callable[[], None]] = []


def start(
    what: str, write: Callable[[], None], discard: Callable[[], None], together: AbstractContextManager[None]
) -> None:
    """Run `write` in a thread. `wait` must have been called since the last `start`.

    Args:
        what: for messages.
        discard: removes what a failed `write` leaves; called by `clean_up`.
        together: a block that raises on every rank if it fails on one. No rank's `write` runs before all have a thread:
            otherwise those that have would wait for one that has none.
    """
    global _under_way  # noqa: PLW0603 - one for the process, as its disk and its memory are
    assert _under_way is None, "the last save has not been waited for"
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    save: _Save | None = None
    try:
        with together:
            save = _Save(what, write, discard)
    except BaseException:
        if save is not None:
            save.leave()
        raise
    save.go()
    _under_way = save


def wait() -> None:
    """Until no save is under way in this process. Local. Raises CheckpointError, once, if the last one failed."""
    global _under_way
    if _under_way is None:
        return
    failed = _under_way.wait()
    discard, _under_way = _under_way.discard, None
    if failed is not None:
        _discards.append(discard)
        raise failed


def clean_up() -> None:
    """Remove what failed saves have left. Local; no rank may still be at work on them."""
    while _discards:
        _discards.pop()()


def _at_exit() -> None:
    """A checkpoint that is not there must not look like success: the process ends with status 1."""
    try:
        wait()
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        atexit._run_exitfuncs()  # those that are still to come: os._exit leaves them out
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

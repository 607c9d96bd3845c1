"""The save that runs in a thread of this process: at most one, and the next call of `sw.checkpoint` waits for it."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from shardwise.errors import CheckpointError

_POLL_S = 1.0
"""Seconds between checks whether the main thread is alive, by a thread that has not been told what to do."""


@dataclass(frozen=True, slots=True)
class SaveTask:
    """The work of one save thread."""

    what: str
    """What is saved, for messages."""
    run: Callable[[], None]
    """The work, called in the thread."""
    discard: Callable[[], None]
    """Removes what a failed `run` left; called by `clean_up`."""


class _Save:
    """A thread and how it ended. The thread does nothing before `decide`."""

    def __init__(self, task: SaveTask) -> None:
        self.task = task
        self._error: BaseException | None = None
        self._is_wanted = False
        self._decided = threading.Event()
        # Not a daemon: the interpreter waits for it before it exits.
        self._thread = threading.Thread(target=self._run, name="shardwise-checkpoint", daemon=False)

    def start(self) -> None:
        self._thread.start()

    def want(self) -> None:
        """Have `decide` let the thread run the task. Without this call the thread ends."""
        self._is_wanted = True

    def decide(self) -> bool:
        """Let the thread run the task if `want` was called, or else end. Returns whether it runs the task."""
        self._decided.set()
        if not self._is_wanted and self._thread.ident is not None:
            self._thread.join()
        return self._is_wanted

    def _run(self) -> None:
        while not self._decided.wait(_POLL_S):  # an interrupt in `start` may keep it from deciding
            if not threading.main_thread().is_alive():
                return
        if not self._is_wanted:
            return
        try:
            self.task.run()
        except BaseException as error:
            self._error = error

    def wait(self) -> CheckpointError | None:
        """Wait until the thread has ended. Returns the error to raise if it failed."""
        if not self.decide():  # an interrupt came just before the decision
            return None
        self._thread.join()
        if self._error is None:
            return None
        failed = CheckpointError(f"the asynchronous save of {self.task.what} failed: {self._error}")
        failed.__cause__ = self._error
        return failed


_under_way: _Save | None = None
_discards: list[Callable[[], None]] = []


def start(task: SaveTask, together: AbstractContextManager[None]) -> None:
    """Run a task in a thread. `wait` must have been called since the last `start`.

    Args:
        task: what to run.
        together: a context manager that raises on every rank if its block fails on one. No rank's task runs before all
            ranks have a thread: otherwise they would wait for a rank that has none.

    Raises RuntimeError if no thread can be started; on other ranks what `together` raises there.
    """
    global _under_way  # noqa: PLW0603 - one for the process, as its disk and its memory are
    assert _under_way is None, "the last save has not been waited for"
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    save = _Save(task)
    try:
        with together:
            save.start()
        _under_way = save
        save.want()
    finally:  # an interrupt may come anywhere: a running thread must not be forgotten
        if not save.decide():
            _under_way = None


def wait() -> None:
    """Wait until no save is under way in this process. No communication.

    Raises CheckpointError, once, if the last one failed.
    """
    global _under_way
    if _under_way is None:
        return
    failed = _under_way.wait()
    discard, _under_way = _under_way.task.discard, None
    if failed is not None:
        _discards.append(discard)
        raise failed


def clean_up() -> None:
    """Remove what failed saves left. No communication; no rank may still be writing there."""
    while _discards:
        _discards.pop()()


def _at_exit() -> None:
    """Print a failure that no call has raised. The exit status is the program's and does not change."""
    try:
        wait()
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)

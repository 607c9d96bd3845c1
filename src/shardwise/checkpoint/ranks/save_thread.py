"""The save that goes on in a thread of this process: at most one, waited for by whatever touches checkpoints next."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from shardwise.errors import CheckpointError

_LOOK_S = 1.0
"""Between looks of a thread that has not been told what to do."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a thread shall do. In the end `leave` is called, whatever came before it."""

    what: str
    """For messages."""
    begin: Callable[[], None]
    """Called where `start` is, before the thread is told to run."""
    run: Callable[[], None]
    """In the thread."""
    leave: Callable[[], None]
    """Undoes `begin`, perhaps again, and also if that has not been called or not to its end."""
    discard: Callable[[], None]
    """Removes what a failed `run` leaves; called by `clean_up`."""


class _Save:
    """A thread and how it ended. It does nothing before `decide`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._error: BaseException | None = None
        self._is_wanted = False
        self._decided = threading.Event()
        # Not a daemon: the interpreter waits for it before it exits.
        self._thread = threading.Thread(target=self._run, name="shardwise-checkpoint", daemon=False)

    def start(self) -> None:
        self._thread.start()

    def want(self) -> None:
        """From here on it is the thread's: what `begin` did, `run` ends."""
        self._is_wanted = True

    def decide(self) -> bool:
        """Let the thread go on: to run, or to its end. Returns whether to run."""
        self._decided.set()
        if not self._is_wanted:
            self.job.leave()
            if self._thread.ident is not None:
                self._thread.join()
        return self._is_wanted

    def _run(self) -> None:
        while not self._decided.wait(_LOOK_S):  # no interrupt lasts longer than the program
            if not threading.main_thread().is_alive():
                return
        if not self._is_wanted:
            return
        try:
            self.job.run()
        except BaseException as error:
            self._error = error
        finally:
            self.job.leave()

    def wait(self) -> CheckpointError | None:
        """Until it has ended; what is to be raised if it failed."""
        if not self.decide():  # an interrupt came when it was about to be decided
            return None
        self._thread.join()
        if self._error is None:
            return None
        failed = CheckpointError(f"the asynchronous save of {self.job.what} failed: {self._error}")
        failed.__cause__ = self._error
        return failed


_under_way: _Save | None = None
_discards: list[Callable[[], None]] = []


def start(job: Job, together: AbstractContextManager[None]) -> None:
    """Run a job in a thread. `wait` must have been called since the last `start`.

    Args:
        together: a block that raises on every rank if it fails on one. No rank's job runs before all have a thread:
            otherwise those that have would wait for one that has none.
    """
    global _under_way  # noqa: PLW0603 - one for the process, as its disk and its memory are
    assert _under_way is None, "the last save has not been waited for"
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    save = _Save(job)
    try:
        with together:
            save.start()
        job.begin()
        _under_way = save
        save.want()
    finally:  # an interrupt may come anywhere: no thread is forgotten that runs
        if not save.decide():
            _under_way = None


def remind() -> None:
    """Tell the thread to go on, if an interrupt kept `start` from that."""
    if _under_way is not None:
        _under_way.decide()


def wait() -> None:
    """Until no save is under way in this process. Local. Raises CheckpointError, once, if the last one failed."""
    global _under_way
    if _under_way is None:
        return
    failed = _under_way.wait()
    discard, _under_way = _under_way.job.discard, None
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

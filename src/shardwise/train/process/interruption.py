"""Interrupting a run: a signal asks for it, and all ranks end after the same step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a run to end. SIGHUP is sent when a terminal is closed or a connection is lost."""


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals of `ENDING_SIGNALS` that end this process's run. Under `nohup`, which ignores SIGHUP, SIGHUP
    is left out and stays ignored."""
    return tuple(n for n in ENDING_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN)


def end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """End the process with status 130: a signal handler for as long as there is nothing to save. A KeyboardInterrupt
    instead could be raised in the middle of an import, which may swallow it or turn it into another error."""
    os._exit(128 + signal.SIGINT)


class Interrupted(KeyboardInterrupt):
    """Raised on every rank when the ranks have agreed to end, so that no rank waits for another."""


class Interruption:
    """Whether this process, a rank or a launcher, has been asked to end, and whether the ranks have agreed to end."""

    def __init__(self) -> None:
        self.asked = False
        """Whether this process has received a signal. Other ranks may not have received it, or not yet."""
        self.agreed = False
        """Whether some rank was asked to end. The same on every rank: the ranks sum `asked` in every step and after
        every forward of an evaluation."""
        self._counted = False
        """Whether a SIGINT or SIGTERM has been received, so that the next one ends this process at once."""

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Inside, replace the handlers of ending signals that would raise KeyboardInterrupt or are `end_at_once`: the
        first signal only sets `asked`, the second raises KeyboardInterrupt at once. SIGHUP sets `asked` but does not
        count as a first or second signal: it is sent by both the shell and the kernel, and torchrun, interrupted by
        SIGHUP, sends SIGTERM after it."""
        before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
        ours = [n for n, handler in before.items() if handler in (signal.default_int_handler, end_at_once)]
        if threading.current_thread() is not threading.main_thread():
            ours = []  # only the main thread handles signals
        try:
            for number in ours:
                signal.signal(number, self._note)
            yield
        finally:
            for number in ours:
                signal.signal(number, before[number])

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP:
            if self._counted:
                raise KeyboardInterrupt
            self._counted = True
        self.asked = True

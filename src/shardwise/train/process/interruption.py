"""Ending a run before its end: asked for by a signal, done by all ranks after the same step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a run to end; SIGHUP comes when a terminal is closed or a connection is lost."""


def ending_signals() -> tuple[signal.Signals, ...]:
    """Those of `ENDING_SIGNALS` that end this process's run: under `nohup`, which has SIGHUP ignored, it stays so."""
    return tuple(n for n in ENDING_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN)


class Interrupted(KeyboardInterrupt):
    """All ranks end here, as they have agreed: none waits for another."""


class Interruption:
    """Whether this rank has been asked to end, and whether the ranks have agreed that they do."""

    def __init__(self) -> None:
        self.asked = False
        """This rank has had a signal. The others may not have, or not yet."""
        self.agreed = False
        """The same on every rank after every step and every forward of an evaluation, in which ranks sum `asked`."""
        self._counted = False
        """A signal has come after which the next one ends this rank at once."""

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Inside, the first signal that would raise KeyboardInterrupt, or whose handler is there `until_heard`, is only
        noted; the second raises KeyboardInterrupt at once. SIGHUP is neither: it comes from the shell and from the
        kernel, and torchrun, interrupted by one, sends SIGTERM after it."""
        before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
        ours = [n for n, handler in before.items() if _is_until_heard(handler)]
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


def _is_until_heard(handler: object) -> bool:
    return handler is signal.default_int_handler or getattr(handler, "until_heard", False)

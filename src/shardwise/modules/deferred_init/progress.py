"""Progress of drawing initial values, and how long it will still take."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Say = Callable[[str], object]

_FIRST_S = 2.0
"""After this time the rate is known well enough for a first report."""
_EVERY_S = 60.0
_WORTH_S = 5.0
"""A report is made only if at least this much time is left."""
_GB = 1e9


def _warn(text: str) -> None:
    warnings.warn(f"shardwise: {text}", stacklevel=2)


_say: ContextVar[Say] = ContextVar("say", default=_warn)


@contextmanager
def log_to(say: Say) -> Iterator[None]:
    """A context in which progress reports go to `say` instead of `warnings.warn`."""
    token = _say.set(say)
    try:
        yield
    finally:
        _say.reset(token)


class DrawingProgress:
    """Progress of drawing values on the CPU. Reports how much is left: once early, then every minute."""

    def __init__(self, total_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`total_bytes`: size of all values that will be drawn. `clock`: returns seconds."""
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._clock = clock
        self._start_s = clock()
        self._next_s = self._start_s + _FIRST_S
        self._hint = '; with sw.init_on_device(), or model.init = "device", each rank draws only what it keeps'

    def drew(self, nbytes: int) -> None:
        """Count `nbytes` more as drawn, and report if it is time."""
        self._done_bytes += nbytes
        now_s = self._clock()
        if now_s < self._next_s or not self._done_bytes:
            return
        self._next_s = now_s + _EVERY_S
        left_s = (now_s - self._start_s) * (self._total_bytes / self._done_bytes - 1)
        if left_s >= _WORTH_S:
            drawn = f"{self._done_bytes / _GB:.1f} of {self._total_bytes / _GB:.1f} GB drawn on the CPU"
            _say.get()(f"initial values: {drawn}, about {_duration(left_s)} left{self._hint}")
            self._hint = ""


def _duration(seconds: float) -> str:
    """15.2 -> "15 s", 200 -> "3 min", 9000 -> "2.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

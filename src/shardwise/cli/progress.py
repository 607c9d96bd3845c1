"""Progress on one line of a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

_REDRAW_S = 0.1


class Progress:
    """Shows (done, total) in words if standard error is a terminal, else nothing."""

    def __init__(self, words: Callable[[int, int], str], wanted: bool = True) -> None:
        """
        Args:
            words: returns the line for (done, total).
            wanted: whether to show anything.
        """
        self._words = words
        self._shown = wanted and sys.stderr.isatty()
        self._drawn_s = 0.0
        self._width = 0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._shown and now - self._drawn_s > _REDRAW_S:
            self._drawn_s = now
            line = self._words(done, total)
            self._width = max(self._width, len(line))
            print(f"\r{line:{self._width}}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line."""
        if self._width:
            print("\r" + " " * self._width + "\r", end="", file=sys.stderr, flush=True)

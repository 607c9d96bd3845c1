"""A curve in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

_LEVELS = "▁▂▃▄▅▆▇█"
_MOST = 2048


class History:
    """The values of a number so far. Memory stays bounded: when there are many, neighbours become their means."""

    def __init__(self) -> None:
        self._means: list[float] = []
        self._each = 1
        """Number of values that an item of `_means` stands for."""
        self._rest: list[float] = []

    def add(self, value: float) -> None:
        """Add a value. One that is not finite is left out."""
        if not math.isfinite(value):
            return
        self._rest.append(value)
        if len(self._rest) == self._each:
            self._means.append(sum(self._rest) / self._each)
            self._rest.clear()
        if len(self._means) == _MOST:
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means = [(left + right) / 2 for left, right in pairs]
            self._each *= 2

    def line(self, width: int) -> str:
        """Return the curve, at most `width` characters wide."""
        return sparkline(self._means or self._rest, width)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve as text: each character is the mean of its part of the values, from the least to the greatest."""
    count = min(width, len(values))
    parts = [values[at * len(values) // count : (at + 1) * len(values) // count] for at in range(count)]
    means = [sum(part) / len(part) for part in parts]
    least, greatest = min(means, default=0.0), max(means, default=0.0)
    scale = (len(_LEVELS) - 1) / (greatest - least) if greatest > least else 0.0
    return "".join(_LEVELS[round((mean - least) * scale)] for mean in means)

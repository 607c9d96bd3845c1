"""The way out of a typing mistake: the nearest names that exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The words "; did you mean X or Y?", to end a message with, or nothing. Never the name itself."""
    near = difflib.get_close_matches(name, [other for other in known if other != name], n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def nearest_path(path: Path) -> str:
    """The same for a path that is missing, from what lies beside it."""
    try:
        beside = [str(entry) for entry in path.parent.iterdir()]
    except OSError:  # nothing is there, or it cannot be looked at
        return ""
    return did_you_mean(str(path), beside)


def divisors(number: int) -> str:
    """The divisors of a number from 1 on, as the words "1, 2, 4"."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)

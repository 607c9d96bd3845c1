"""Suggestions after a typing mistake: the nearest names that exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean X or Y?" to end a message with, or "" if no known name is near. Never suggests `name`."""
    near = difflib.get_close_matches(name, [other for other in known if other != name], n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def nearest_path(path: Path) -> str:
    """Return the same for a missing path, suggesting entries of its parent directory."""
    try:
        beside = [str(entry) for entry in path.parent.iterdir()]
    except OSError:  # the parent is missing or cannot be listed
        return ""
    return did_you_mean(str(path), beside)


def divisors(number: int) -> str:
    """Return the divisors of a number in ascending order, as text: "1, 2, 4"."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)

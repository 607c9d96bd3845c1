"""Formatting of text tables: rows of values in named columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardwise.tables import aligned

_UNITS = ("B", "kB", "MB", "GB", "TB")


def amount(size_bytes: float) -> str:
    """Return bytes in the largest unit that gives at least 1, such as "1.5 MB" (1.5 million)."""
    index = 0
    while abs(size_bytes) >= 1000 and index < len(_UNITS) - 1:
        size_bytes /= 1000
        index += 1
    return f"{size_bytes:.0f} {_UNITS[index]}" if index == 0 else f"{size_bytes:.3g} {_UNITS[index]}"


def columns(head: Sequence[str], rows: Sequence[Sequence[object]], right: Collection[str]) -> str:
    """Return rows below a head as text in columns.

    Args:
        head: names of the columns.
        rows: one value for each column.
        right: the names of the columns that are aligned right.
    """
    return "\n".join(aligned([head, *rows], [index for index, name in enumerate(head) if name in right]))


def without_numbers(path: str) -> str:
    """Return the path with * in place of numbers, so that the paths of all layers are equal."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))

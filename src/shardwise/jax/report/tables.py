"""Tables: rows of named values, printed in columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardwise.tables import aligned

_UNITS = ("B", "kB", "MB", "GB", "TB")


def amount(size_bytes: float) -> str:
    """Bytes in the largest unit that leaves at least one of it, such as "1.5 MB" (1.5 million)."""
    index = 0
    while abs(size_bytes) >= 1000 and index < len(_UNITS) - 1:
        size_bytes /= 1000
        index += 1
    return f"{size_bytes:.0f} {_UNITS[index]}" if index == 0 else f"{size_bytes:.3g} {_UNITS[index]}"


def columns(head: Sequence[str], rows: Sequence[Sequence[object]], right: Collection[str]) -> str:
    """The rows below the head in columns.

    Args:
        head: names of the columns.
        rows: one value for each column.
        right: the names of columns whose cells end on the right.
    """
    return "\n".join(aligned([head, *rows], [index for index, name in enumerate(head) if name in right]))


def without_numbers(path: str) -> str:
    """The path with * in place of numbers, which layers differ in."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))

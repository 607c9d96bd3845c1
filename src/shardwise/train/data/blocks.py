"""A source cut into blocks, each of which can be read by itself: what is before it is not.

A source is a line of bytes: those of its text files, and those that the rows of its tables have in memory-mapped files.
Blocks are equal stretches of that line. A row belongs to the block in which it begins; text is cut where lines begin.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import xxhash

from shardwise.errors import ConfigError
from shardwise.train.config.files import reading
from shardwise.train.data.documents import TEXT_ERRORS

KeyedRow = tuple[str, Mapping[str, Any]]
"""A row's name and its fields, as `document_of_row` takes them."""
LEAST_BLOCK_BYTES = 2**20
_LONGEST_LINE = LEAST_BLOCK_BYTES // 4
"""Bytes in which the beginning of a line is looked for. It is less than half a block, so that blocks stay in order."""


class Stretch(Protocol):
    """A file of a source, or a table."""

    @property
    def size(self) -> int:
        """Its bytes."""

    @property
    def count(self) -> int:
        """Its rows."""

    def rows(self, first: int, last: int) -> Iterator[KeyedRow]:
        """Yield the rows that begin from byte `first` on and before byte `last`."""


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file of text: one row, or one for each block that it is cut into."""

    name: str
    path: Path

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def count(self) -> int:
        return 1

    def rows(self, first: int, last: int) -> Iterator[KeyedRow]:
        with self.path.open("rb") as file:
            size = self.size
            begin, end = _line(file, first, size), _line(file, last, size)
            file.seek(begin)
            text = file.read(end - begin).decode(errors=TEXT_ERRORS)
        yield self.name if end - begin == size else f"{self.name}@{begin}", {"text": text}


def _line(file: BufferedReader, place: int, size: int) -> int:
    """Return the first byte from `place` on that begins a line; where there is none nearby, one that begins a
    character."""
    if not 0 < place < size:
        return place
    file.seek(place - 1)
    window = file.read(_LONGEST_LINE)
    found = window.find(b"\n")
    if found >= 0:
        return place + found
    return place + next((at for at, byte in enumerate(window[1:5]) if byte & 0xC0 != 0x80), 0)


@dataclass(frozen=True, slots=True, eq=False)
class TableRows:
    """The rows of a table."""

    name: str
    table: Any
    """A `datasets.Dataset`: memory-mapped."""

    @property
    def size(self) -> int:
        return max(int(self.table.data.nbytes), self.count)

    @property
    def count(self) -> int:
        return len(self.table)

    def rows(self, first: int, last: int) -> Iterator[KeyedRow]:
        size, count = self.size, self.count  # a row begins where it would if all were of the same size
        begin, end = (-(-place * count // size) for place in (first, last))
        for number, row in enumerate(self.table.select(range(begin, end)), begin + 1):
            yield f"{self.name}:{number}", row


class Blocks:
    """A source's blocks."""

    def __init__(self, source: str, stretches: Iterable[Stretch], most_bytes: int) -> None:
        """
        Args:
            source: its name, for errors.
            stretches: in the order of the source.
            most_bytes: of a block, at least `LEAST_BLOCK_BYTES`.

        Raises:
            ConfigError: the source is empty.
        """
        self._source = source
        sized = [(stretch, stretch.size) for stretch in stretches]
        self._stretches = [stretch for stretch, size in sized if size]
        self._ends = [*accumulate(size for _, size in sized if size)]
        if not self._ends:
            raise ConfigError(f"data.source={source!r} is empty")
        self._count = -(-self._ends[-1] // most_bytes)

    def __len__(self) -> int:
        return self._count

    @property
    def size(self) -> int:
        """Bytes of all blocks."""
        return self._ends[-1]

    @property
    def digest(self) -> str:
        """A short text that identifies where blocks begin: a hash over the sizes of all files and tables."""
        counts = [stretch.count for stretch in self._stretches]
        return xxhash.xxh3_64_hexdigest(f"{self._count} {self._ends} {counts}".encode())

    def rows(self, number: int) -> Iterator[KeyedRow]:
        """Yield the rows of block `number`, perhaps none. Raises ConfigError if a file cannot be read."""
        first, last = (self.size * block // self._count for block in (number, number + 1))
        with reading("data.source", self._source):
            for at in range(bisect_right(self._ends, first), len(self._ends)):
                begin = self._ends[at - 1] if at else 0
                if begin >= last:
                    return
                end = min(last, self._ends[at])
                yield from self._stretches[at].rows(max(first - begin, 0), end - begin)

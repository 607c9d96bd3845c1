"""Checksums of the regions of a file, computed while it is written."""

from __future__ import annotations

from typing import Any, NamedTuple

import xxhash

_REGION_BYTES = 256 * 2**20
"""A region grows to about this size while writes continue it."""


class Region(NamedTuple):
    """Bytes [start, stop) of a file and their checksum, 16 hexadecimal digits."""

    start: int
    stop: int
    sum: str


class RegionSums:
    """Checksums of bytes as they are written: bytes that directly follow the last ones extend their region."""

    def __init__(self) -> None:
        self._done: list[Region] = []
        self._hash = xxhash.xxh3_64()
        self._start = self._stop = 0

    def add(self, start: int, data: Any) -> None:
        """Note that `data` (a buffer) has been written at byte `start`."""
        if start != self._stop or self._stop - self._start >= _REGION_BYTES:
            self._close()
            self._start = self._stop = start
        self._hash.update(data)
        self._stop += memoryview(data).nbytes

    def regions(self) -> list[Region]:
        """Return all regions, in the order of writing."""
        self._close()
        self._start = self._stop
        return list(self._done)

    def _close(self) -> None:
        if self._stop > self._start:
            self._done.append(Region(self._start, self._stop, self._hash.hexdigest()))
        self._hash.reset()

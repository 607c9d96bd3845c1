"""Byte ranges on their way from files: several at a time, neighbours together, past the page cache where that pays.

The kernel reads a file into small pages unless one reader goes through it from end to end, which ranks that each read
their own ranges do not; and a disk is asked for less at a time the smaller the pages are. So whole pages are read into
a little memory in huge pages, and copied to where they belong. Pages that the page cache has are taken from there.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Self

import numpy as np

from shardwise.checkpoint.io.storage import Source
from shardwise.files.direct import PAGE_BYTES, huge_page_buffer
from shardwise.files.thread_pool import ThreadPool
from shardwise.layout.flat import round_up

_BUFFERS, _BUFFER_BYTES = 4, 4 * 2**20
"""As many are read into at a time."""
_LEAST_BYTES = 256 * 2**10
"""Less is read through the page cache: it is not worth a wait for the disk."""
_GAP_BYTES = 64 * 2**10
"""Between ranges that are read together."""


class Buffers(SimpleQueue[memoryview]):
    """What whole pages are read into, one buffer for each thread that reads; of a load, for one file after another.

    They cost nothing until they are used.
    """

    def __init__(self) -> None:
        super().__init__()
        memory = huge_page_buffer(_BUFFERS * _BUFFER_BYTES)
        for i in range(_BUFFERS):
            self.put(memory[i * _BUFFER_BYTES :][:_BUFFER_BYTES])


class RangeReader:
    """Reads ranges of one file. A context manager; all requested bytes are there after `finish`."""

    def __init__(self, source: Source, buffers: Buffers) -> None:
        self._source = source
        self._buffers = buffers
        self._pool = ThreadPool(_BUFFERS)
        self._asked: deque[Future[int]] = deque()
        self._window: _ReadWindow | None = None
        self.direct_bytes = 0
        """Requested bytes that came past the page cache."""

    def __enter__(self) -> Self:
        self._pool.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.__exit__(*error)

    def ask(self, start: int, into: memoryview, past_cache: bool = True) -> None:
        """Fill `into` from byte `start` on; ranges in the order of the file are read together.

        past_cache: no other process of this machine is going to read these bytes.

        Raises EOFError, perhaps only in a later call, with the position, if the file ends before.
        """
        while into.nbytes:
            if self._window is not None and not self._window.takes(start, past_cache):
                self._put()
            if self._window is None:
                self._window = _ReadWindow(start, past_cache)
            step = self._window.add(start, into)
            into, start = into[step:], start + step

    def finish(self) -> None:
        """Wait for everything that was asked for."""
        self._put()
        while self._asked:
            self.direct_bytes += self._asked.popleft().result()

    def _put(self) -> None:
        window, self._window = self._window, None
        if window is None:
            return
        if len(self._asked) > _BUFFERS:
            self.direct_bytes += self._asked.popleft().result()
        self._asked.append(self._pool.submit(self._read, window))

    def _read(self, window: _ReadWindow) -> int:
        """Returns the bytes wanted that came past the page cache."""
        reached, direct_bytes = window.base, 0
        if window.past_cache and window.stop - window.base >= _LEAST_BYTES:
            buffer = self._buffers.get()
            try:
                pages = buffer[: round_up(window.stop - window.base, PAGE_BYTES)]
                reached += self._source.read_pages(window.base, pages)
                direct_bytes = window.take(pages, reached)
            finally:
                self._buffers.put(buffer)
        for start, into in window.ranges:
            done = min(max(0, reached - start), into.nbytes)
            self._source.read_at(start + done, into[done:])
        return direct_bytes


class _ReadWindow:
    """Some pages of a file, and the ranges in them that are wanted."""

    def __init__(self, start: int, past_cache: bool) -> None:
        self.base = start // PAGE_BYTES * PAGE_BYTES
        self.stop = start
        self.past_cache = past_cache
        self.ranges: list[tuple[int, memoryview]] = []

    def takes(self, start: int, past_cache: bool) -> bool:
        """Whether the next range, or its beginning, belongs here."""
        follows = self.stop <= start <= self.stop + _GAP_BYTES
        return follows and start < self.base + _BUFFER_BYTES and past_cache == self.past_cache

    def add(self, start: int, into: memoryview) -> int:
        """Take as much of a range as fits. Returns the bytes taken."""
        step = min(into.nbytes, self.base + _BUFFER_BYTES - start)
        self.ranges.append((start, into[:step]))
        self.stop = start + step
        return step

    def take(self, pages: memoryview, reached: int) -> int:
        """Copy bytes that were read, up to byte `reached` of the file, into their ranges. Returns their number."""
        read, taken_bytes = np.frombuffer(pages, dtype=np.uint8), 0
        for start, into in self.ranges:
            done = min(max(0, reached - start), into.nbytes)
            if done:
                np.copyto(np.frombuffer(into[:done], dtype=np.uint8), read[start - self.base :][:done])
            taken_bytes += done
        return taken_bytes

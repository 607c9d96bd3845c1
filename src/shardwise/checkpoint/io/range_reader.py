"""Reads byte ranges of files: several at a time, neighbours together, past the page cache where that pays.

The kernel reads a file into small pages unless one reader goes through it from end to end, which ranks that each read
their own ranges do not do; and the smaller the pages, the less is asked of a disk at a time. So whole pages are read
into a few buffers of huge pages, and copied from there to where they belong. Pages that are in the page cache are taken
from it.
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
from shardwise.fsdp.layout import round_up

_BUFFERS, _BUFFER_BYTES = 4, 4 * 2**20
"""Number of buffers, all of which may be read into at the same time, and the size of each."""
_LEAST_BYTES = 256 * 2**10
"""Fewer bytes are read through the page cache: they are not worth a wait for the disk."""
_GAP_BYTES = 64 * 2**10
"""Largest gap between ranges that are read together."""


class Buffers(SimpleQueue[memoryview]):
    """The buffers that whole pages are read into, one for each reading thread. A load uses them for one file after
    another.

    They cost nothing until they are used.
    """

    def __init__(self) -> None:
        super().__init__()
        memory = huge_page_buffer(_BUFFERS * _BUFFER_BYTES)
        for i in range(_BUFFERS):
            self.put(memory[i * _BUFFER_BYTES :][:_BUFFER_BYTES])


class RangeReader:
    """Reads ranges of one file. A context manager; all requested bytes have arrived after `finish`."""

    def __init__(self, source: Source, buffers: Buffers) -> None:
        self._source = source
        self._buffers = buffers
        self._pool = ThreadPool(_BUFFERS)
        self._asked: deque[Future[int]] = deque()
        self._window: _ReadWindow | None = None
        self.direct_bytes = 0
        """Requested bytes that were read past the page cache."""

    def __enter__(self) -> Self:
        self._pool.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.__exit__(*error)

    def ask(self, start: int, into: memoryview, past_cache: bool = True) -> None:
        """Request that `into` be filled from byte `start` on; ranges in the order of the file are read together.

        past_cache: whether to read past the page cache: right if no other process of this machine is going to read
        these bytes.

        Raises EOFError with the position, perhaps only in a later call, if the file ends too early.
        """
        while into.nbytes:
            if self._window is not None and not self._window.takes(start, past_cache):
                self._put()
            if self._window is None:
                self._window = _ReadWindow(start, past_cache)
            step = self._window.add(start, into)
            into, start = into[step:], start + step

    def finish(self) -> None:
        """Wait until all requested bytes have arrived."""
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
        """Fill a window's ranges. Returns how many of their bytes were read past the page cache."""
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
    """Some pages of a file, and the requested ranges in them."""

    def __init__(self, start: int, past_cache: bool) -> None:
        self.base = start // PAGE_BYTES * PAGE_BYTES
        self.stop = start
        self.past_cache = past_cache
        self.ranges: list[tuple[int, memoryview]] = []

    def takes(self, start: int, past_cache: bool) -> bool:
        """Return whether the next range, or its beginning, belongs to this window."""
        follows = self.stop <= start <= self.stop + _GAP_BYTES
        return follows and start < self.base + _BUFFER_BYTES and past_cache == self.past_cache

    def add(self, start: int, into: memoryview) -> int:
        """Take as much of a range as fits. Returns the number of bytes taken."""
        step = min(into.nbytes, self.base + _BUFFER_BYTES - start)
        self.ranges.append((start, into[:step]))
        self.stop = start + step
        return step

    def take(self, pages: memoryview, reached: int) -> int:
        """Copy bytes that were read to `pages`, up to byte `reached` of the file, to their ranges. Returns how many."""
        read, taken_bytes = np.frombuffer(pages, dtype=np.uint8), 0
        for start, into in self.ranges:
            done = min(max(0, reached - start), into.nbytes)
            if done:
                np.copyto(np.frombuffer(into[:done], dtype=np.uint8), read[start - self.base :][:done])
            taken_bytes += done
        return taken_bytes

"""Writes byte ranges to files: gathered in a few buffers, some of which are written while another is filled.

Whole pages go past the page cache if the file system lets them (O_DIRECT): the kernel then need not find pages for
bytes that are not read soon, nor copy into them, and there is little left to wait for at the end. The rest, less than a
page at either end of what a rank writes in one piece, goes through the page cache; so does everything if the file
system refuses.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Self

import numpy as np

from shardwise.checkpoint.io.checksums import Region, RegionSums
from shardwise.files.direct import PAGE_BYTES, cut_at_pages, huge_page_buffer
from shardwise.files.local_file import write_at, write_pages
from shardwise.files.thread_pool import ThreadPool
from shardwise.layout.ranges import Range

Ranges = Iterator[tuple[int, bytes | memoryview]]
"""Pairs of a byte position in a file and the bytes that belong there."""

_BUFFERS, _BUFFER_BYTES = 4, 4 * 2**20
"""Number of buffers, one of which is filled while the others are written, and the size of each."""
_LEAST_BYTES = 256 * 2**10
"""Fewer bytes are not worth a wait for the disk: they are kept, and go through the page cache."""
_KEPT_BYTES = 2**20
"""Most bytes that are kept. They are written together: a write through the page cache waits until nothing else is
written to the file."""
_MOST_OPEN = 128
"""Most files open at a time. In many places a process may have 1,024, and a rank has bytes in every file of a save."""
_STEP_BYTES = 512 * 2**10
"""Bytes that are copied and summed at a time, while they are in the processor's cache."""


class RangeWriter:
    """Writes one rank's ranges of one file after another. A context manager.

    Files stay open until they are on disk: the kernel reports a failed write only to descriptors that were open then.
    """

    def __init__(self) -> None:
        self._pool = ThreadPool(_BUFFERS - 1)
        memory = huge_page_buffer(_BUFFERS * _BUFFER_BYTES)
        self._free = [memory[i * _BUFFER_BYTES :][:_BUFFER_BYTES] for i in range(_BUFFERS)]
        self._busy: deque[tuple[Future[int], memoryview]] = deque()
        self._files: list[_File] = []
        self.written_bytes = self.direct_bytes = 0
        """Bytes written in all, and those of them that went past the page cache."""

    def __enter__(self) -> Self:
        self._pool.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.__exit__(*error)
        while self._files:
            self._files.pop().close()

    def write(self, path: Path, ranges: Iterable[tuple[int, bytes | memoryview]]) -> list[Region]:
        """Write `ranges`, in order and without overlaps, to a file that exists. On disk after `sync`.

        Returns the checksums of the written bytes. Raises OSError, perhaps only in a later call.
        """
        if len(self._files) == _MOST_OPEN:
            self.sync()
        file, sums = _File(path), RegionSums()
        self._files.append(file)
        window: _WriteWindow | None = None
        for start, data in ranges:
            view = memoryview(data).cast("B")
            if window is not None and window.stop != start:
                self._put(file, window)
                window = None
            while view:
                window = window or _WriteWindow(self._take(), start)
                step = window.fill(view)
                sums.add(start, view[:step])
                self.written_bytes += step
                view, start = view[step:], start + step  # noqa: PLW2901
                if window.is_full:
                    self._put(file, window)
                    window = None
        if window is not None:
            self._put(file, window)
        while self._busy:
            self._wait()
        file.write_kept()
        file.end_direct()
        return sums.regions()

    def sync(self) -> None:
        """Wait until everything that was written is on disk."""
        for future in [self._pool.submit(os.fsync, file.fd) for file in self._files]:
            future.result()
        while self._files:
            self._files.pop().close()

    def _put(self, file: _File, window: _WriteWindow) -> None:
        """Submit a window's bytes for writing, or keep them for `write_kept` if they are few."""
        pages = cut_at_pages(window.start, window.stop)
        if file.is_direct and pages.whole.length >= _LEAST_BYTES:
            for edge in (pages.head, pages.tail):
                file.keep(edge.start, window.at(edge))
            writing = self._pool.submit(file.write_pages, pages.whole.start, window.at(pages.whole))
        elif window.stop - window.start >= _LEAST_BYTES:
            writing = self._pool.submit(file.write, window.start, window.at(Range(window.start, window.stop)))
        else:
            file.keep(window.start, window.at(Range(window.start, window.stop)))
            self._free.append(window.memory)
            return
        self._busy.append((writing, window.memory))

    def _take(self) -> memoryview:
        """Return a buffer to fill; if all are being written, wait for the one that has been longest."""
        if not self._free:
            self._wait()
        return self._free.pop()

    def _wait(self) -> None:
        writing, memory = self._busy.popleft()
        self.direct_bytes += writing.result()
        self._free.append(memory)


class _WriteWindow:
    """A buffer for some pages of a file, and the range of them that has been filled."""

    def __init__(self, memory: memoryview, start: int) -> None:
        self.memory = memory
        self._bytes = np.frombuffer(memory, dtype=np.uint8)
        self._base = start // PAGE_BYTES * PAGE_BYTES
        self.start = self.stop = start

    @property
    def is_full(self) -> bool:
        return self.stop - self._base == self.memory.nbytes

    def fill(self, data: memoryview) -> int:
        """Copy the beginning of `data`, at most `_STEP_BYTES`. Returns the number of bytes copied."""
        at = self.stop - self._base
        step = min(data.nbytes, _STEP_BYTES, self.memory.nbytes - at)
        np.copyto(self._bytes[at : at + step], np.frombuffer(data[:step], dtype=np.uint8))
        self.stop += step
        return step

    def at(self, part: Range) -> memoryview:
        return self.memory[part.start - self._base : part.stop - self._base]


class _File:
    """One file, open for writing through the page cache and, where that is possible, past it."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_WRONLY)
        self._direct: int | None = None
        self._refused = not hasattr(os, "O_DIRECT")
        if not self._refused:
            with suppress(OSError):  # then write through the page cache
                self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
        self._cached = threading.Lock()
        self._kept: list[tuple[int, bytes]] = []
        self._kept_bytes = 0

    def close(self) -> None:
        os.close(self.fd)
        self.end_direct()

    def end_direct(self) -> None:
        """Stop writing past the page cache. Errors of such writes have already been raised."""
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None

    @property
    def is_direct(self) -> bool:
        """Whether whole pages can go past the page cache, as far as is known."""
        return self._direct is not None and not self._refused

    def write(self, start: int, data: memoryview | bytes) -> int:
        """Write through the page cache, one thread at a time: the kernel admits only one to a file, and those that wait
        spin.

        Returns the bytes that went past it: none.
        """
        with self._cached:
            write_at(self.fd, start, data)
        return 0

    def write_pages(self, start: int, data: memoryview) -> int:
        """Write past the page cache, or through it if the file system refuses after all. Returns the bytes that went
        past it."""
        assert self._direct is not None
        direct_bytes = write_pages(self._direct, start, data)
        if direct_bytes < data.nbytes:
            self._refused = True
            self.write(start + direct_bytes, data[direct_bytes:])
        return direct_bytes

    def keep(self, start: int, data: memoryview) -> None:
        """Copy a few bytes for `write_kept`."""
        if data.nbytes:
            self._kept.append((start, bytes(data)))
            self._kept_bytes += data.nbytes
        if self._kept_bytes >= _KEPT_BYTES:
            self.write_kept()

    def write_kept(self) -> None:
        for start, data in self._kept:
            write_at(self.fd, start, data)
        self._kept, self._kept_bytes = [], 0

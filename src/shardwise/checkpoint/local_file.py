"""One file of this machine's file systems, open for reading: through the page cache, and past it."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from shardwise.checkpoint.pages import PAGE_BYTES, REFUSALS, around

_LEAST_BYTES = 256 * 2**10
"""Less is read through the page cache: what the disk reads ahead then serves the next."""
_BUFFER_BYTES = 4 * 2**20 + 2 * PAGE_BYTES
"""Of whole pages, read at once; of each thread that reads."""


class LocalFile:
    """A Source. Any number of threads may read at a time."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY)
        self._direct: int | None = None
        with suppress(OSError, AttributeError):  # whatever it says, the other way is open
            self._direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._buffers: list[memoryview] = []
        """That nobody reads into."""

    def close(self) -> None:
        os.close(self._fd)
        if self._direct is not None:
            os.close(self._direct)

    def read_at(self, start: int, into: memoryview) -> None:
        while into.nbytes:
            count = os.preadv(self._fd, [into], start)
            if not count:
                raise EOFError(start)
            into, start = into[count:], start + count

    def read_once(self, start: int, into: memoryview) -> None:
        """See Source. What is in the page cache already is taken from there."""
        if self._direct is None or into.nbytes < _LEAST_BYTES or self._is_cached(start):
            return self.read_at(start, into)
        asked = around(start, start + 1)
        buffer = self._buffers.pop() if self._buffers else memoryview(mmap.mmap(-1, _BUFFER_BYTES))
        try:
            while into.nbytes:
                count = self._read_pages(start, into[: _BUFFER_BYTES - start % PAGE_BYTES], buffer)
                if not count:  # the end, or a file system that turns out to refuse
                    return self.read_at(start, into)
                into, start = into[count:], start + count
        finally:
            self._buffers.append(buffer)
            # Asking had it read: left there it would say to the next who asks that all is.
            os.posix_fadvise(self._fd, asked.start, asked.length, os.POSIX_FADV_DONTNEED)

    def _read_pages(self, start: int, into: memoryview, buffer: memoryview) -> int:
        """Read the pages that hold `into` and copy it. Returns its bytes that were there."""
        assert self._direct is not None
        pages = around(start, start + into.nbytes)
        try:
            found = os.preadv(self._direct, [buffer[: pages.length]], pages.start)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            return 0
        count = max(0, min(found - (start - pages.start), into.nbytes))
        source = np.frombuffer(buffer, dtype=np.uint8)[start - pages.start :][:count]
        np.copyto(np.frombuffer(into, dtype=np.uint8)[:count], source)
        return count

    def _is_cached(self, start: int) -> bool:
        """Whether the page cache has the byte: then it will have most of what follows."""
        try:
            return os.preadv(self._fd, [bytearray(1)], start, os.RWF_NOWAIT) > 0
        except (OSError, AttributeError):  # no; or a system that does not say
            return False

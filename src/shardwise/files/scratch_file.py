"""A file of one process, without a name: the system frees it with the process, however that ends."""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from shardwise.files.local_file import allocate, read_at, read_pages, write_at, write_pages

PREFIX = ".shardwise-scratch-"
"""Of the name that it has for a moment where file systems know no files without one. Whatever has such a name for
longer is the remains of a process that died in that moment."""
_NO_NAMELESS = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}


class ScratchFile:
    """Read and written in whole pages, past the page cache where the file system lets it, by several threads."""

    def __init__(self, directory: Path) -> None:
        """
        Args:
            directory: made if it is not there. Raises OSError.
        """
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        for remains in directory.glob(f"{PREFIX}*"):
            remains.unlink(missing_ok=True)  # those that are in use go on without it
        self._fd = _open_nameless(directory)
        self._direct: int | None = None
        if hasattr(os, "O_DIRECT"):
            with suppress(OSError):  # then through the page cache
                self._direct = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_DIRECT)
        # Threads that read or write hold this object: no descriptor is closed, and used for another file, under them.
        self._closing = weakref.finalize(self, _close, [fd for fd in (self._fd, self._direct) if fd is not None])
        self.nbytes = 0
        """Allocated."""

    @property
    def is_direct(self) -> bool:
        """Whether it goes past the page cache, as far as is known."""
        return self._direct is not None

    def grow(self, nbytes: int) -> None:
        """Allocate so many bytes in all. Raises OSError where the disk has no room for them."""
        allocate(self._fd, nbytes)
        self.nbytes = nbytes

    def write(self, start: int, data: memoryview) -> None:
        """Write whole pages, from page-aligned memory, at byte `start`, a page's first. Raises OSError."""
        done = 0 if self._direct is None else write_pages(self._direct, start, data)
        if done < data.nbytes:
            self._direct = None
            write_at(self._fd, start + done, data[done:])

    def read(self, start: int, into: memoryview) -> None:
        """Likewise read. Raises OSError; EOFError where the file ends before."""
        done = 0 if self._direct is None else read_pages(self._direct, start, into)
        read_at(self._fd, start + done, into[done:])

    def read_some(self, start: int, into: memoryview) -> None:
        """Read any bytes into any memory. Raises OSError; EOFError where the file ends before."""
        read_at(self._fd, start, into)

    def write_some(self, start: int, data: memoryview) -> None:
        """Write any bytes from any memory. On disk before pages around them are written past the page cache.

        Raises OSError.
        """
        write_at(self._fd, start, data)

    def settle(self) -> None:
        """Have everything from `write_some` on disk, so that whole pages can go past the page cache again."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Free the file. Happens by itself when nobody refers to it any more."""
        self._closing()


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _open_nameless(directory: Path) -> int:
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
        except OSError as error:
            if error.errno not in _NO_NAMELESS:
                raise
    fd, name = tempfile.mkstemp(prefix=PREFIX, dir=directory)
    Path(name).unlink(missing_ok=True)
    return fd

"""A file of one process, without a name, so that the system frees it when the process ends in any way."""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from shardwise.files.local_file import allocate, read_at, read_pages, write_at, write_pages

PREFIX = ".shardwise-scratch-"
"""Prefix of the name that the file has for a moment if the file system does not support unnamed files. A file that
keeps such a name was left by a process that died in that moment."""
_NO_NAMELESS = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}


class ScratchFile:
    """An unnamed file that several threads read and write in whole pages, past the page cache where possible."""

    def __init__(self, directory: Path) -> None:
        """
        Args:
            directory: created if it does not exist. Raises OSError.
        """
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        for remains in directory.glob(f"{PREFIX}*"):
            remains.unlink(missing_ok=True)  # a file in use does not need its name
        self._fd = _open_nameless(directory)
        self._direct: int | None = None
        if hasattr(os, "O_DIRECT"):
            with suppress(OSError):  # then I/O uses the page cache
                self._direct = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_DIRECT)
        # Threads that read or write hold this object, so no descriptor is closed and reused for another file meanwhile.
        self._closing = weakref.finalize(self, _close, [fd for fd in (self._fd, self._direct) if fd is not None])
        self.nbytes = 0
        """Bytes allocated on disk."""

    @property
    def is_direct(self) -> bool:
        """Whether I/O goes past the page cache. May change to False if a write is refused."""
        return self._direct is not None

    def grow(self, nbytes: int) -> None:
        """Allocate `nbytes` in total. Raises OSError if the disk has no space for them."""
        allocate(self._fd, nbytes)
        self.nbytes = nbytes

    def write(self, start: int, data: memoryview) -> None:
        """Write whole pages, from page-aligned memory, at byte `start`, a page boundary. Raises OSError."""
        done = 0 if self._direct is None else write_pages(self._direct, start, data)
        if done < data.nbytes:
            self._direct = None
            write_at(self._fd, start + done, data[done:])

    def read(self, start: int, into: memoryview) -> None:
        """Read whole pages into page-aligned memory. Raises OSError; EOFError if the file ends first."""
        done = 0 if self._direct is None else read_pages(self._direct, start, into)
        read_at(self._fd, start + done, into[done:])

    def read_some(self, start: int, into: memoryview) -> None:
        """Read any bytes into any memory. Raises OSError; EOFError if the file ends first."""
        read_at(self._fd, start, into)

    def write_some(self, start: int, data: memoryview) -> None:
        """Write any bytes from any memory, through the page cache. Raises OSError.

        Call `settle` before pages around them are written past the page cache.
        """
        write_at(self._fd, start, data)

    def settle(self) -> None:
        """Flush everything from `write_some` to disk, so that whole pages can be written past the page cache again."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Free the file. Also happens when the last reference to this object is gone."""
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

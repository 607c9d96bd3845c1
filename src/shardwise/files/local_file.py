"""Reading and writing files of mounted file systems, through the page cache and past it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np

from shardwise.files.direct import PAGE_BYTES, REFUSALS


def write_at(fd: int, start: int, data: memoryview | bytes) -> None:
    """Write all of `data` at byte `start` of a file. Raises OSError."""
    view = memoryview(data)
    while view.nbytes:
        count = os.pwrite(fd, view, start)
        view, start = view[count:], start + count


def read_at(fd: int, start: int, into: memoryview) -> None:
    """Fill `into` from byte `start` of a file. Raises OSError; EOFError, with the position, if the file ends first."""
    while into.nbytes:
        count = os.preadv(fd, [into], start)
        if not count:
            raise EOFError(start)
        into, start = into[count:], start + count


def write_pages(fd: int, start: int, data: memoryview) -> int:
    """Write whole pages past the page cache; `fd` must be open with O_DIRECT. Returns the number of bytes written:
    fewer than all if the file system refuses direct I/O. Raises OSError for any other error."""
    done = 0
    try:
        while done < data.nbytes:
            done += os.pwrite(fd, data[done:], start + done)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
    return done


def read_pages(fd: int, start: int, into: memoryview) -> int:
    """Read whole pages in the same way. Returns the number of bytes read: fewer also if the file ends."""
    done = 0
    try:
        while done < into.nbytes:
            count = os.preadv(fd, [into[done:]], start + done)
            done += count
            if not count or done % PAGE_BYTES:  # the file ends here
                break
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
    return done


def allocate(fd: int, nbytes: int) -> None:
    """Allocate disk space for a file's first `nbytes`, so that a full disk is an error now. Raises OSError.

    File systems that cannot allocate only set the size.
    """
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            raise
        os.ftruncate(fd, nbytes)


class LocalFile:
    """A local file open for reading. See `storage.Source`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY)
        self._direct: _Direct | None = None
        self._is_tried = False
        self._trying = threading.Lock()

    def close(self) -> None:
        """Close all file descriptors and the mapping."""
        os.close(self._fd)
        if self._direct is not None:
            self._direct.close()

    def read_at(self, start: int, into: memoryview) -> None:
        """See `storage.Source`."""
        read_at(self._fd, start, into)

    def read_pages(self, start: int, into: memoryview) -> int:
        """See `storage.Source`."""
        with self._trying:
            if not self._is_tried:
                self._is_tried = True
                self._direct = self._opened_past_cache()
        if self._direct is None or self._direct.share_cached(start, into.nbytes) > 0.5:
            return 0
        return self._direct.read(start, into)

    def _opened_past_cache(self) -> _Direct | None:
        """Open the file for direct I/O if that is known to be faster, on a disk of this machine; else return None.

        Other file systems (NFS, FUSE, those in memory, Btrfs, ZFS) have no device of their own, and do their own
        readahead.
        """
        status = os.fstat(self._fd)
        if os.major(status.st_dev) and status.st_size and hasattr(os, "O_DIRECT"):
            with suppress(OSError, ValueError):  # then reads use the page cache
                return _Direct(self._path, status)
        return None


class _Direct:
    """A file open for direct I/O, and mapped to find out which of its pages are in the page cache."""

    def __init__(self, path: Path, status: os.stat_result) -> None:
        """
        Args:
            status: of the file to open. Raises OSError or ValueError if `path` is another file by now.
        """
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            if not os.path.samestat(status, os.fstat(self.fd)):
                raise ValueError(f"{path} has been replaced")
            self._mapping = mmap.mmap(self.fd, status.st_size, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            os.close(self.fd)
            raise
        self._nbytes = status.st_size
        self._address = int(np.frombuffer(self._mapping, dtype=np.uint8).ctypes.data)

    def close(self) -> None:
        os.close(self.fd)
        self._mapping.close()

    def read(self, start: int, into: memoryview) -> int:
        """See `storage.Source.read_pages`."""
        return read_pages(self.fd, start, into)

    def share_cached(self, start: int, nbytes: int) -> float:
        """Return the share of cached pages in `nbytes` from `start` on, which is a page boundary. 1 if the kernel does
        not say, or the range is empty.

        The kernel tells only the file's owner and those who may write to it; for others all pages seem to be cached.
        The query does not read the file, unlike `preadv2` with RWF_NOWAIT.
        """
        nbytes = min(nbytes, self._nbytes - start)
        if nbytes <= 0:
            return 1.0
        found = np.zeros(-(-nbytes // mmap.PAGESIZE), dtype=np.uint8)
        if _mincore(self._address + start, nbytes, found.ctypes.data):
            return 1.0
        return float((found & 1).mean())


_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

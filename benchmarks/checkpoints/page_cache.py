"""What the page cache holds of a checkpoint's files: getting rid of it, and filling it."""

import ctypes
import mmap
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def drop(directory: Path) -> float:
    """Have every file below a directory on disk and out of the page cache; returns the share that stayed (0 to 1)."""
    pages = resident = 0
    for path in sorted(directory.rglob("*")):
        if not path.is_file() or not path.stat().st_size:
            continue
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # a dirty page cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            found = _resident(fd, path.stat().st_size)
        finally:
            os.close(fd)
        pages += len(found)
        resident += sum(found)
    return resident / max(1, pages)


def fill(directory: Path) -> None:
    """Have every file below a directory in the page cache."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(2**22):
                    pass


def _resident(fd: int, nbytes: int) -> list[int]:
    """For each page of a file whether it is in memory."""
    address = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    pages = ctypes.create_string_buffer(-(-nbytes // mmap.PAGESIZE))
    try:
        if _libc.mincore(address, nbytes, pages):
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        _libc.munmap(address, nbytes)
    return [byte & 1 for byte in pages.raw]

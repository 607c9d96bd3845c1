"""Asking the disk to begin: what is written while it works need not be waited for at the end."""

from __future__ import annotations

import ctypes

_LEAST_BYTES = 2**20
"""Less than that is left to fsync: asking costs more than it brings."""
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin to write dirty pages, do not wait


def begin(fd: int, start: int, nbytes: int) -> None:
    """Have bytes [start, start + nbytes) of a file on their way to disk. A hint: only fsync says that they are there.

    Does nothing where the operating system (Linux has it) or the file system cannot.
    """
    if _sync_file_range is not None and nbytes >= _LEAST_BYTES:
        _sync_file_range(fd, start, nbytes, _WRITE)


def _find() -> ctypes._NamedFuncPointer | None:
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


_sync_file_range = _find()

"""Memory for bytes on their way to and from files, in huge pages where the kernel gives them.

What goes past the page cache the disk reads from, and writes to, this memory itself, in requests of so many physically
contiguous parts at most. Of 4 KiB pages that is 1 MiB or less a request; of huge pages whatever is asked for.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

_HUGE_BYTES = 2 * 2**20


def room(nbytes: int) -> memoryview:
    """Fresh memory, zeros, aligned to pages. Of its own mapping, which goes when nobody holds a part of it."""
    if nbytes < _HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return memoryview(mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:nbytes]
    mapping = mmap.mmap(-1, nbytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without
        mapping.madvise(mmap.MADV_HUGEPAGE)
    address = int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
    start = -address % _HUGE_BYTES
    return memoryview(mapping)[start : start + nbytes]

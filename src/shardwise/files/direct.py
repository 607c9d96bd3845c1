"""Direct I/O: whole pages past the page cache (O_DIRECT), and the memory for them.

A direct transfer moves bytes between the disk and the program's memory, in requests with a limited number of physically
contiguous segments. With 4 KiB pages that is at most 1 MiB for each request; huge pages remove this limit.
"""

from __future__ import annotations

import errno
import mmap
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from shardwise.layout.ranges import Range

PAGE_BYTES = max(4096, mmap.PAGESIZE)
"""Disks need multiples of 512 or 4096 bytes. Bytes written past the page cache must not share a page with bytes written
through it: writeback of that page would restore the old bytes beside them."""
REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
"""Errors of file systems that do not support direct I/O."""
_HUGE_BYTES = 2 * 2**20


class Pages(NamedTuple):
    """A range of bytes in three parts: whole pages, and the ends, which are in pages that others may write to."""

    head: Range
    whole: Range
    tail: Range


def cut_at_pages(start: int, stop: int, page_bytes: int = PAGE_BYTES) -> Pages:
    """Cut bytes [start, stop) of a file at the first and last page boundary. Without a whole page, all is head."""
    first, last = -(-start // page_bytes) * page_bytes, stop // page_bytes * page_bytes
    if first >= last:
        return Pages(Range(start, stop), Range(stop, stop), Range(stop, stop))
    return Pages(Range(start, first), Range(first, last), Range(last, stop))


def huge_page_buffer(nbytes: int) -> memoryview:
    """Return new zeroed memory, aligned to pages. It is a mapping of its own, freed with its last view."""
    if nbytes < _HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return memoryview(mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:nbytes]
    mapping = mmap.mmap(-1, nbytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    address = int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
    start = -address % _HUGE_BYTES
    return memoryview(mapping)[start : start + nbytes]

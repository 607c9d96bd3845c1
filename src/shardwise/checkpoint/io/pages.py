"""Whole pages of a file: what can be written past the page cache (O_DIRECT). Pure arithmetic."""

from __future__ import annotations

import errno
import mmap
from typing import NamedTuple

from shardwise.layout.ranges import Range

PAGE_BYTES = max(4096, mmap.PAGESIZE)
"""Disks ask for multiples of 512 or 4096 bytes, and what goes past the page cache must not share a page with what does
not: who writes the page back would write the old bytes of its neighbour."""
REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
"""What a file system says that does not let them."""


class Pages(NamedTuple):
    """A range of bytes in three: whole pages, and what lies before and after them in pages that others may write to."""

    head: Range
    whole: Range
    tail: Range


def cut(start: int, stop: int, page_bytes: int = PAGE_BYTES) -> Pages:
    """Cut bytes [start, stop) of a file at its first and its last page boundary. Without a whole page all is head."""
    first, last = -(-start // page_bytes) * page_bytes, stop // page_bytes * page_bytes
    if first >= last:
        return Pages(Range(start, stop), Range(stop, stop), Range(stop, stop))
    return Pages(Range(start, first), Range(first, last), Range(last, stop))

"""Standard output and error of a run, which continues when nobody can read them any more."""

from __future__ import annotations

import errno
import io
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NOBODY_READS = frozenset({errno.EIO, errno.EPIPE})
"""Error codes of writes to a terminal that is gone, and to a pipe without a reader."""
_CLOSED = "nobody reads standard output any more: the run continues (metrics.jsonl has every step), and Ctrl-C stops it"


def outlive_readers() -> None:
    """Make this process drop what it prints, instead of raising, once nobody can read it.

    When a terminal is closed, a failing print must not keep the run from saving. If only standard output was closed, as
    by `| head`, a message on standard error says once that the run goes on. `sys.stdout` and `sys.stderr` are left
    alone if a program has replaced them.
    """
    if sys.stdout is sys.__stdout__ and sys.__stdout__ is not None:
        sys.stdout = _outliving(sys.__stdout__, _CLOSED)
    if sys.stderr is sys.__stderr__ and sys.__stderr__ is not None:
        sys.stderr = _outliving(sys.__stderr__)


def _outliving(stream: TextIO, words: str = "") -> TextIO:
    assert isinstance(stream, io.TextIOWrapper)
    stream.flush()
    file = _Unread(stream.fileno(), "wb", closefd=False)
    file.words = words
    return io.TextIOWrapper(
        file if stream.write_through else io.BufferedWriter(file),  # unbuffered under -u, as in Python itself
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Unread(io.FileIO):
    """A file that reports bytes as written even if nobody can read them any more."""

    words = ""
    """Message that is printed to standard error the first time that a pipe has no reader; empty for none."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _NOBODY_READS:
                raise
            if self.words and error.errno == errno.EPIPE:
                words, self.words = self.words, ""
                print(words, file=sys.stderr, flush=True)
            return memoryview(data).nbytes

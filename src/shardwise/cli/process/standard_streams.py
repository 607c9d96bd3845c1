"""Standard output and error of a run, which goes on when nobody can read them any more."""

from __future__ import annotations

import errno
import io
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NOBODY_READS = frozenset({errno.EIO, errno.EPIPE})
"""A terminal that is gone; a pipe without a reader."""
_CLOSED = "nobody reads standard output any more: the run goes on (metrics.jsonl has every step), and Ctrl-C stops it"


def outlive_readers() -> None:
    """From now on what this process prints is dropped where nobody can read it.

    When a terminal is closed, words for it must not keep a run from saving. Where standard output alone was closed, as
    by `| head`, standard error says once that the run goes on. Streams that a program has put in the place of the
    process's own stay as they are.
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
        file if stream.write_through else io.BufferedWriter(file),  # as Python does for -u
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Unread(io.FileIO):
    """A file that takes bytes which nobody can read any more for written."""

    words = ""
    """For standard error, the first time."""

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

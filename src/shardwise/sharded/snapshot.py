"""A thread that copies pieces while training goes on, and whom every write through an outer face waits for.

One per process, for a moment: an asynchronous save that copies optimizer state. A write to `.local` itself comes past
this; whoever copies compares version counters for that.
"""

from __future__ import annotations

import os
import threading

_under_way: Snapshot | None = None


class Snapshot:
    """From here to `end`, which any thread may call, in-place operations on ShardedParameters wait."""

    def __init__(self) -> None:
        global _under_way  # noqa: PLW0603 - looked at by every write
        assert _under_way is None, "another snapshot is being taken"
        self._ended = threading.Event()
        _under_way = self

    def end(self) -> None:
        """Let those who wait go on. Again: nothing."""
        global _under_way  # noqa: PLW0603
        if _under_way is self:
            _under_way = None
        self._ended.set()

    def wait(self) -> None:
        """Until it has ended."""
        self._ended.wait()


def wait() -> None:
    """Until no snapshot is being taken. To be called before an outer face's piece is written."""
    snapshot = _under_way
    if snapshot is not None:
        snapshot.wait()


def _forget() -> None:
    """The thread that copies is not there in a forked process."""
    global _under_way  # noqa: PLW0603
    _under_way = None


os.register_at_fork(after_in_child=_forget)

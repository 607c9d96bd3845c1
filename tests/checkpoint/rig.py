"""What the tests of checkpoints share: failures, threads that wait, and counted reads."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.files.direct import PAGE_BYTES


def away(monkeypatch: pytest.MonkeyPatch, file: str, number: int = errno.EIO, function: str = "open") -> None:
    """From now on a file cannot be opened, or once it is open not be read."""
    original, fds = os.open, set()

    def open_(path: Any, *arguments: Any, **options: Any) -> int:
        found = str(path).endswith(file)
        if found and function == "open":
            raise OSError(number, os.strerror(number))
        fd = original(path, *arguments, **options)
        fds.add(fd) if found else fds.discard(fd)
        return fd

    preadv = os.preadv

    def preadv_(fd: int, *arguments: Any) -> int:
        if fd in fds and function == "preadv":
            raise OSError(number, os.strerror(number))
        return preadv(fd, *arguments)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv_)


@contextmanager
def held(function: str = "pwrite") -> Iterator[threading.Event]:
    """No thread but the main one gets through a function of `os` before the event is set, which the end does."""
    original, opened = getattr(os, function), threading.Event()

    def waiting(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert opened.wait(20)
        return original(*arguments)

    setattr(os, function, waiting)
    try:
        yield opened
    finally:
        opened.set()
        join_save_threads()
        setattr(os, function, original)


def save_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shardwise-checkpoint"]


def join_save_threads() -> None:
    """Without being told what went wrong."""
    for thread in save_threads():
        thread.join()


def fail_in_thread(patch: pytest.MonkeyPatch, function: str, call: int) -> None:
    calls = iter(range(10_000))
    original = getattr(os, function)

    def failing(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and next(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*arguments)

    patch.setattr(os, function, failing)


FILE_BYTES = 40 * PAGE_BYTES + 123


def content(nbytes: int = FILE_BYTES) -> bytes:
    return np.random.default_rng(5).bytes(nbytes)


def skip_unless_direct(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except (OSError, AttributeError) as error:
        pytest.skip(f"nothing goes past the page cache here: {error}")
    if not os.major(path.stat().st_dev):
        pytest.skip("this is not a disk of this machine")


def drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


class Reads:
    """Every `preadv` of this process: whether it went past the page cache, and the bytes it brought."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.direct: list[int] = []
        self.cached: list[int] = []
        original = os.preadv

        def counting(fd: int, buffers: Any, offset: int) -> int:
            count = original(fd, buffers, offset)
            (self.direct if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else self.cached).append(count)
            return count

        patch.setattr(os, "preadv", counting)

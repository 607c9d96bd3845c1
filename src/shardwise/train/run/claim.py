"""The lock on a run's directory, which one launch at a time may write to: rank 0 locks a file in it while it runs."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from shardwise.errors import ConfigError

NAME = ".running"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of file systems without locks."""


@contextmanager
def claimed(run: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a run's directory inside the block. Does not communicate; only rank 0 enters.

    The operating system releases the lock when the process ends, however it ends.

    Args:
        run: the directory. It is created if missing, and removed at the end if it is still empty.
        say: called with a line of warning if the storage does not support locks.

    Raises:
        ConfigError: another launch holds the lock (the message names its process), or the directory cannot be written.
    """
    made = [path for path in (run, *run.parents) if not path.exists()]
    path = run / NAME
    try:
        run.mkdir(parents=True, exist_ok=True)
        fd = _locked(path, say)
    except OSError as error:
        raise ConfigError(f"cannot write the run directory {run}: {error.strerror} ({error.filename})") from None
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # while still locked, so that a launch that has opened the file notices that it is gone
        os.close(fd)
        for directory in made:
            with suppress(OSError):  # not empty
                directory.rmdir()


def _locked(path: Path, say: Callable[[str], None]) -> int:
    """Lock the file, write this process's description into it, and return its descriptor."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            _lock(fd, path, say)
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):  # else the last holder removed the file
                began = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}, started at {began}".encode(), 0)
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _lock(fd: int, path: Path, say: Callable[[str], None]) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 512, 0).decode(errors="replace") or "another process"
        raise ConfigError(
            f"{path.parent} is being written by {holder}: wait for it, stop it, or set log.name to train in "
            "another directory"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        say(f"{path.parent} is on storage without locks: a second run that writes there would not be noticed")

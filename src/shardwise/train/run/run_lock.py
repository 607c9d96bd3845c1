"""The lock on a run's directory, which one launch at a time may write to: rank 0 locks a file in it while it runs."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from shardwise.errors import ConfigError

NAME = ".lock"


@contextmanager
def claimed(run: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a run's directory inside the block. Does not communicate; only rank 0 enters.

    The operating system releases the lock when the process ends, however it ends. The file stays, with a line about
    the last process that held the lock: if it were removed, a launch that has opened it could lock a file that is gone.

    Args:
        run: the directory. It is created if missing.
        say: called with a line of warning if the storage does not support locks.

    Raises:
        ConfigError: another launch holds the lock (the message names its process), or the directory cannot be written.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        fd = os.open(run / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise ConfigError(f"cannot write the run directory {run}: {error.strerror} ({error.filename})") from None
    with os.fdopen(fd, "r+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = file.read() or "another process"
            raise ConfigError(
                f"{run} is being written by {holder}: wait for it, stop it, or set log.name to train in "
                "another directory"
            ) from None
        except OSError:
            say(f"{run} is on storage without locks: a second run that writes there would not be noticed")
        began = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}, started at {began}")
        file.flush()
        yield

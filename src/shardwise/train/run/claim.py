"""A run's directory belongs to one launch at a time: rank 0 holds a lock on a file in it for as long as it runs.

The lock is the operating system's, a record lock (POSIX): it ends with the process however that ends, network file
systems have it too, and children that a process forks do not inherit it, so that none of them keeps it alive. What is
in the file only tells whoever is refused by whom.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardwise.checkpoint.ranks.file_barrier import machine
from shardwise.comm.shared_memory.counters import birth
from shardwise.errors import ConfigError
from shardwise.train.ranks import Ranks

NAME = ".running"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
"""What file systems say that have no locks, or whose server does not answer for them."""
_WRITTEN_S = 0.5
"""Within which a process that has the lock has said who it is."""


@contextmanager
def claimed(run: Path, ranks: Ranks, say: Callable[[str], None]) -> Iterator[None]:
    """Nobody else trains in a run's directory inside this block. Every rank must enter.

    Args:
        run: the directory, made if it is not there; removed again if nothing was put there.
        say: is told where only processes of this machine can be told apart.

    Raises:
        ConfigError: another launch has it, or it cannot be written; the message says which process. A CheckpointError
            on the other ranks.
    """
    claim: _Claim | None = None
    try:
        with ranks.together():
            if ranks.is_first:
                claim = _Claim(run)
                claim.take(say)
        yield
    finally:
        if claim is not None:
            claim.release()


def seen_by_all(run: Path, ranks: Ranks) -> bool:
    """Whether what rank 0 writes in a claimed directory is there for every rank. Every rank must call this."""
    try:
        claim = (run / NAME).read_bytes()
    except OSError:
        claim = b""
    said = ranks.hear(claim)
    return said[0] != b"" and len(set(said)) == 1


class _Claim:
    """One process's hold on a run's directory."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._path = run / NAME
        self._made: list[Path] = []
        self._fd = -1

    def take(self, say: Callable[[str], None]) -> None:
        try:
            self._made = [path for path in (self._run, *self._run.parents) if not path.exists()]
            self._run.mkdir(parents=True, exist_ok=True)
            while self._fd < 0:
                self._try(say)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(_own()).encode(), 0)
        except OSError as error:
            if os.path.islink(self._path):  # noqa: PTH114 - which the directory may not let be seen
                raise ConfigError(f"{self._path} is a link, and what it leads to would be lost: remove it") from None
            raise ConfigError(f"cannot write the run directory {self._run}: {error.strerror}") from None

    def _try(self, say: Callable[[str], None]) -> None:
        """Lock the file, unless it is no longer the one of that name: whoever had it has just ended."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            self._lock(fd, say)
            if self._is_there(fd):
                self._fd, fd = fd, -1
        finally:
            if fd >= 0:
                os.close(fd)

    def _lock(self, fd: int, say: Callable[[str], None]) -> None:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in {errno.EACCES, errno.EAGAIN}:
                raise self._taken(_holder(fd)) from None
            if error.errno not in _NO_LOCKS:
                raise
            holder = _read(fd)
            if holder and holder["machine"] == machine() and birth(holder["pid"]) == holder["born"]:
                raise self._taken(holder) from None
            say(f"{self._run} lies on storage without locks: only this machine's other launches can be noticed")

    def _is_there(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), self._path.stat())
        except FileNotFoundError:
            return False

    def _taken(self, holder: dict[str, Any]) -> ConfigError:
        who, stop = "another process", "stop it"
        if holder:
            who = f"process {holder['pid']} on {holder['host']}, which began at {holder['began']}"
            stop = f"stop it (kill {holder['pid']})"
        return ConfigError(
            f"{self._run} is being written by {who}: wait for it, {stop}, or set log.name to train beside it; if there "
            f"is no such process, remove {self._path}"
        )

    def release(self) -> None:
        """Leave nothing behind."""
        if self._fd >= 0:
            with suppress(OSError):
                self._path.unlink()  # while it is locked: who has opened it sees that it is gone
            os.close(self._fd)
            self._fd = -1
        for path in self._made:
            with suppress(OSError):  # it is of use
                path.rmdir()


def _own() -> dict[str, Any]:
    began = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "began": began, "machine": machine(), "born": birth(pid)}


def _holder(fd: int) -> dict[str, Any]:
    """Who has the lock: said at once, but not at the same moment."""
    deadline = time.monotonic() + _WRITTEN_S
    while not (holder := _read(fd)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return holder


def _read(fd: int) -> dict[str, Any]:
    """Empty where nothing of the kind is there."""
    try:
        found = json.loads(os.pread(fd, 4096, 0))
    except ValueError:
        return {}
    known = isinstance(found, dict) and {"pid", "host", "began", "machine", "born"} <= found.keys()
    return found if known else {}

"""Every change that this process makes to files below a directory, seen one at a time, in order, before it is made.

    def look(change: Change) -> Death | None: ...

    with watching(directory, look):
        ...                                     # look() is asked before each change, and may end the process there

Python's own calls of the operating system are replaced, and files are opened by Python's own implementation of `open`,
so that what `write_text`, `json.dump` or `shutil.rmtree` do is seen as the calls that they make.
"""

from __future__ import annotations

import _pyio
import builtins
import enum
import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any


class Death(enum.Enum):
    """How a process ends at a change."""

    BEFORE = "before"
    """The change is not made."""
    HALF = "half"
    """Half of a write's bytes are written."""


@dataclass(frozen=True, slots=True)
class Change:
    """One call of the operating system."""

    call: str
    path: str
    """Below the directory."""
    to: str = ""
    """The second path of a rename."""
    offset: int | None = None
    """Of a write, in bytes; None: where the last one ended."""
    data: bytes = b""
    nbytes: int = 0
    """Written, or the size that a file gets."""
    time_ns: int = 0
    """Monotonic, when the call began."""

    @property
    def writes(self) -> bool:
        return self.call in _WRITES

    def __str__(self) -> str:
        return " ".join(filter(None, (self.call, self.path, self.to)))


Look = Callable[[Change], "Death | None"]
_WRITES = ("write", "pwrite")
_BY_PATH = ("mkdir", "rmdir", "unlink", "remove", "truncate")
_TWO_PATHS = ("rename", "replace", "link", "symlink")
_BY_FILE = ("fsync", "fdatasync", "ftruncate", "posix_fallocate")
_VECTORS = ("writev", "pwritev", "sendfile", "copy_file_range", "splice")
_CREATES = os.O_CREAT | os.O_TRUNC


@contextmanager
def watching(directory: str | os.PathLike[str], look: Look, die: Callable[[], None]) -> Iterator[None]:
    """Ask `look` before each change below a directory; where it answers with a death, `die()` is called."""
    watch = _Watch(os.path.realpath(directory), look, die)
    names = ("open", *_WRITES, *_BY_PATH, *_TWO_PATHS, *_BY_FILE, *_VECTORS)
    originals = {name: getattr(os, name) for name in names}
    opens = builtins.open, io.open
    watch.install(originals)
    builtins.open = io.open = watch.open_file  # type: ignore[assignment]
    try:
        yield
    finally:
        builtins.open, io.open = opens  # type: ignore[assignment]
        for name, function in originals.items():
            setattr(os, name, function)


class _Watch:
    def __init__(self, directory: str, look: Look, die: Callable[[], None]) -> None:
        self._directory = directory
        self._look = look
        self._die = die
        self._open = builtins.open
        self._os: dict[str, Any] = {}

    def install(self, originals: dict[str, Any]) -> None:
        self._os = originals
        os.open = self.open  # type: ignore[assignment]
        for name in _WRITES:
            setattr(os, name, partial(self.write, name))
        for name in _BY_PATH:
            setattr(os, name, partial(self.by_path, name))
        for name in _TWO_PATHS:
            setattr(os, name, partial(self.two_paths, name))
        for name in _BY_FILE:
            setattr(os, name, partial(self.by_file, name))
        for name in _VECTORS:
            setattr(os, name, partial(self.refuse, name))

    def open_file(self, file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        """`open`, by Python's own implementation, which calls `os`, where the file is below the directory."""
        if not isinstance(file, int) and set(mode) & set("wax+") and self._below(file) is not None:
            return _pyio.open(os.fspath(file), mode, *arguments, **options)
        return self._open(file, mode, *arguments, **options)

    def open(self, path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & _CREATES:
            absolute = self._absolute(path, options.get("dir_fd"))
            if not os.path.exists(absolute) or flags & os.O_TRUNC:  # noqa: PTH110 - may be bytes
                self._ask("create", absolute)
        return int(self._os["open"](path, flags, *arguments, **options))

    def write(self, name: str, fd: int, data: Any, *offset: int) -> int:
        path = self._path_of(fd)
        if path is None:
            return int(self._os[name](fd, data, *offset))
        view = memoryview(data).cast("B")
        change = Change(name, path, "", *(offset or (None,)), bytes(view), view.nbytes, time.monotonic_ns())
        if self._decide(change) is Death.HALF:
            self._os[name](fd, view[: view.nbytes // 2], *offset)
            self._die()
        return int(self._os[name](fd, data, *offset))

    def by_path(self, name: str, path: Any, *arguments: Any, **options: Any) -> None:
        self._ask("unlink" if name == "remove" else name, self._absolute(path, options.get("dir_fd")))
        self._os[name](path, *arguments, **options)

    def two_paths(self, name: str, source: Any, target: Any, **options: Any) -> None:
        self._ask("rename" if name == "replace" else name, source, target)
        self._os[name](source, target, **options)

    def by_file(self, name: str, fd: Any, *arguments: Any) -> None:
        fd = fd if isinstance(fd, int) else fd.fileno()
        self._ask(name, f"/proc/self/fd/{fd}", nbytes=sum(arguments))
        self._os[name](fd, *arguments)

    def refuse(self, name: str, *arguments: Any) -> Any:
        for fd in arguments[:2]:
            if isinstance(fd, int) and self._path_of(fd) is not None:
                raise NotImplementedError(f"os.{name} is a change that nobody looks at: teach file_changes.py about it")
        return self._os[name](*arguments)

    def _ask(self, call: str, path: Any, to: Any = None, nbytes: int = 0) -> None:
        below = self._below(path)
        if below is None:
            return
        change = Change(call, below, self._below(to) or "" if to else "", nbytes=nbytes, time_ns=time.monotonic_ns())
        self._decide(change)

    def _decide(self, change: Change) -> Death | None:
        death = self._look(change)
        if death is Death.BEFORE or (death and not change.writes):
            self._die()
        return death

    def _absolute(self, path: Any, dir_fd: int | None) -> str:
        path = os.fsdecode(path)
        return path if dir_fd is None else os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)  # noqa: PTH118, PTH115

    def _path_of(self, fd: int) -> str | None:
        try:
            return self._below(f"/proc/self/fd/{fd}")
        except OSError:
            return None

    def _below(self, path: Any) -> str | None:
        """The path below the directory; "." for itself, None if it is elsewhere. Follows links to its parent only."""
        path = os.fsdecode(path)
        if path.startswith("/proc/self/fd/"):
            real = os.readlink(path)  # noqa: PTH115
        else:
            parent, name = os.path.split(os.path.abspath(path))  # noqa: PTH100
            real = os.path.join(os.path.realpath(parent), name)  # noqa: PTH118
        if real == self._directory:
            return "."
        return real[len(self._directory) + 1 :] if real.startswith(self._directory + "/") else None

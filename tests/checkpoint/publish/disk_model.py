"""What a disk may hold after the power went: only what was fsynced is certain, everything else is or is not there.

    disk = Disk()
    for rank, change in changes: disk.apply(change, rank)
    for survives in Survives.every():
        disk.write(directory, survives)         # one of the states in which the machine may come up again

A model of shared POSIX file systems at their least: fsync of a file keeps the bytes that the same rank wrote to it,
fsync of a directory keeps its names; a rename or a new name that was not fsynced may be kept or lost, and bytes that
were not fsynced may be lost while the file's size is kept.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.checkpoint.publish.file_changes import Change


@dataclass(frozen=True)
class Survives:
    """Which of the things that were never fsynced are there all the same."""

    names_at_top: bool
    """In the directory that holds the checkpoints."""
    names_below: bool
    sizes: bool
    """Of files; their bytes are zeros."""

    @staticmethod
    def every() -> Iterator[Survives]:
        for choice in itertools.product((False, True), repeat=3):
            yield Survives(*choice)


@dataclass(eq=False)
class _File:
    size: int = 0
    kept: bytearray = field(default_factory=bytearray)
    unsynced: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    """By rank: offsets and bytes."""

    def write(self, rank: int, start: int, data: bytes) -> None:
        self.unsynced.setdefault(rank, []).append((start, data))
        self.size = max(self.size, start + len(data))

    def sync(self, rank: int) -> None:
        for start, data in self.unsynced.pop(rank, []):
            self.kept = self.kept.ljust(start, b"\0")
            self.kept[start : start + len(data)] = data


@dataclass(eq=False)
class _Directory:
    now: dict[str, _File | _Directory] = field(default_factory=dict)
    kept: dict[str, _File | _Directory] = field(default_factory=dict)

    def sync(self, rank: int) -> None:
        self.kept = dict(self.now)


class Disk:
    """Files below one directory, as programs see them and as they are certain to be after a power loss."""

    def __init__(self) -> None:
        self._top = _Directory()

    def apply(self, change: Change, rank: int) -> None:
        """Make a rank's change. Raises NotImplementedError for one that the model does not know."""
        directory, name = self._parent(change.path)
        match change.call:
            case "mkdir":
                directory.now[name] = _Directory()
            case "create":
                directory.now[name] = _File()
            case "unlink" | "rmdir":
                del directory.now[name]
            case "rename":
                moved = directory.now.pop(name)
                target, new = self._parent(change.to)
                target.now[new] = moved
            case "fsync" | "fdatasync":
                self._find(change.path).sync(rank)
            case "posix_fallocate":
                self._file(change.path).write(rank, change.nbytes, b"")
            case "write" | "pwrite":
                file = self._file(change.path)
                file.write(rank, file.size if change.offset is None else change.offset, change.data)
            case _:
                raise NotImplementedError(change.call)

    def write(self, path: Path, survives: Survives) -> None:
        """Make the files that may be found."""
        self._write(self._top, path, survives, survives.names_at_top)

    def _write(self, directory: _Directory, path: Path, survives: Survives, names: bool) -> None:
        path.mkdir()
        for name, entry in (directory.now if names else directory.kept).items():
            if isinstance(entry, _Directory):
                self._write(entry, path / name, survives, survives.names_below)
            else:
                size = entry.size if survives.sizes else 0
                (path / name).write_bytes(bytes(entry.kept).ljust(size, b"\0"))

    def _parent(self, path: str) -> tuple[_Directory, str]:
        parent, name = os.path.split(path)
        directory = self._find(parent)
        assert isinstance(directory, _Directory)
        return directory, name

    def _file(self, path: str) -> _File:
        found = self._find(path)
        assert isinstance(found, _File), path
        return found

    def _find(self, path: str) -> _File | _Directory:
        found: _File | _Directory = self._top
        for name in Path(path).parts:
            assert isinstance(found, _Directory)
            found = found.now[name]
        return found

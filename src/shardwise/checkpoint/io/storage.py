"""Where checkpoints are stored: directories of files, on a file system or wherever fsspec reaches. No torch."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardwise.files.local_file import LocalFile

Location = str | os.PathLike[str]
"""A path, or a URL such as "s3://bucket/run/step-000100"."""


class Source(Protocol):
    """A file that is open for reading, by several threads at a time."""

    def read_at(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on. Raises EOFError, with the position, if the file ends first."""

    def read_pages(self, start: int, into: memoryview) -> int:
        """Fill `into` (whole pages in page-aligned memory) from byte `start` (the first of a page) on, past the page
        cache.

        Returns the bytes that were read: fewer if the file ends too early, none if that way is not possible or not
        faster.
        """


class Directory(Protocol):
    """A directory's own files, by plain names. Nothing is cached: changes by other processes are seen."""

    @property
    def location(self) -> Path | str:
        """The path or URL from which `directory_of` makes this directory."""

    def child(self, name: str) -> Directory:
        """Return a directory in this one."""

    def names(self) -> list[str]:
        """Return the names of the files and directories in it, sorted; none if there is no such directory."""

    def has(self, name: str) -> bool:
        """Return whether it has a file of that name."""

    def size(self, name: str) -> int:
        """Return the bytes of a file. Raises FileNotFoundError."""

    def read(self, name: str) -> bytes:
        """Return the content of a small file. Raises FileNotFoundError."""

    def open(self, name: str) -> AbstractContextManager[Source]:
        """Open a file for reading byte ranges. Raises FileNotFoundError."""

    def write(self, name: str, data: bytes, durable: bool = True) -> None:
        """Create or replace a small file; if `durable`, it is on disk when this returns."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""


def directory_of(location: Location) -> Directory:
    """Return the directory at a path or URL, which need not exist.

    Raises UsageError if fsspec, or what it needs for this kind of URL, is not installed.
    """
    text = os.fspath(location)
    if not is_url(text):
        return LocalDirectory(Path(text))
    from shardwise.checkpoint.io.remote import RemoteDirectory

    return RemoteDirectory.of(text)


def check_location(location: object, call: str) -> None:
    """Raise TypeError unless `location` is a path: most often the model was given first."""
    if not isinstance(location, str | os.PathLike):
        raise TypeError(
            f"{call}: the path must come first, as a string or a pathlib.Path, not a {type(location).__name__}"
        )


def is_url(location: Location) -> bool:
    """Return whether `location` is a URL, for fsspec, and not a path."""
    return "://" in os.fspath(location)


@dataclass(frozen=True, slots=True)
class LocalDirectory:
    """A directory of a file system that this machine has mounted."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def location(self) -> Path:
        """See `Directory`."""
        return self.path

    def child(self, name: str) -> LocalDirectory:
        """See `Directory`."""
        return LocalDirectory(self.path / name)

    def names(self) -> list[str]:
        """See `Directory`."""
        try:  # ranks that wait for a commit look here while the directory is renamed
            return sorted(entry.name for entry in self.path.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def has(self, name: str) -> bool:
        """See `Directory`."""
        return (self.path / name).is_file()

    def size(self, name: str) -> int:
        """See `Directory`."""
        return (self.path / name).stat().st_size

    def read(self, name: str) -> bytes:
        """See `Directory`."""
        return (self.path / name).read_bytes()

    def open(self, name: str) -> AbstractContextManager[Source]:
        """See `Directory`."""
        return closing(LocalFile(self.path / name))

    def write(self, name: str, data: bytes, durable: bool = True) -> None:
        """See `Directory`."""
        with (self.path / name).open("wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())

    def remove(self, name: str) -> None:
        """See `Directory`."""
        (self.path / name).unlink(missing_ok=True)

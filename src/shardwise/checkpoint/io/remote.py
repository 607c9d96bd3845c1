"""Directories that fsspec reaches: object stores, and any file system that it knows by a URL.

Objects are written once, from their beginning to their end, and cannot be renamed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from io import UnsupportedOperation
from typing import Any

from shardwise.errors import UsageError

_READ_BYTES = 32 * 2**20
"""Bytes requested at a time: fsspec returns a copy of them."""


@dataclass(frozen=True, slots=True)
class RemoteDirectory:
    """A prefix of an object store, or a directory."""

    url: str
    fs: Any
    """An fsspec.AbstractFileSystem."""
    root: str
    """The directory's path in `fs`."""

    @classmethod
    def of(cls, url: str) -> RemoteDirectory:
        """Return the directory at a URL. Raises UsageError if fsspec, or what it needs for this URL, is missing."""
        try:
            from fsspec.core import url_to_fs
        except ModuleNotFoundError:
            raise UsageError(f"{url} needs fsspec, which is not installed: pip install 'shardwise[storage]'") from None
        try:
            fs, root = url_to_fs(url)
        except (ImportError, ValueError) as error:  # without what fsspec needs for s3, gs, ...
            raise UsageError(f"{url} cannot be reached: {error}") from None
        return cls(url.rstrip("/"), fs, root.rstrip("/"))

    def __str__(self) -> str:
        return self.url

    @property
    def location(self) -> str:
        """See `storage.Directory`."""
        return self.url

    def child(self, name: str) -> RemoteDirectory:
        """See `storage.Directory`."""
        return RemoteDirectory(f"{self.url}/{name}", self.fs, self._path(name))

    def make(self) -> None:
        """Create the directory and its parents, on file systems that have directories."""
        self.fs.makedirs(self.root, exist_ok=True)

    def names(self) -> list[str]:
        """See `storage.Directory`."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(self.root, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted({path.rstrip("/").rpartition("/")[2] for path in found} - {""})

    def has(self, name: str) -> bool:
        """See `storage.Directory`."""
        self.fs.invalidate_cache()
        return bool(self.fs.isfile(self._path(name)))

    def size(self, name: str) -> int:
        """See `storage.Directory`."""
        self.fs.invalidate_cache()
        return int(self.fs.info(self._path(name))["size"])

    def read(self, name: str) -> bytes:
        """See `storage.Directory`."""
        return bytes(self.fs.cat_file(self._path(name)))

    def open(self, name: str) -> AbstractContextManager[_RemoteSource]:
        """See `storage.Directory`."""
        return nullcontext(_RemoteSource(self.fs, self._path(name)))

    def write(self, name: str, data: bytes, durable: bool = True) -> None:
        """See `storage.Directory`."""
        with self.writing(name, durable) as file:
            file.write(data)

    def remove(self, name: str) -> None:
        """See `storage.Directory`."""
        if self.has(name):
            self.fs.rm_file(self._path(name))

    @contextmanager
    def writing(self, name: str, durable: bool = True) -> Iterator[Any]:
        """Open a file object to write one object with; the object exists when the block has been left without an error.

        An object store keeps what it has accepted; a file system behind fsspec is asked to sync if `durable`.
        """
        file = self.fs.open(self._path(name), "wb")
        try:
            yield file
            if durable:
                file.flush()
                with suppress(UnsupportedOperation):
                    os.fsync(file.fileno())
        finally:
            file.close()

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"


@dataclass(frozen=True, slots=True)
class _RemoteSource:
    fs: Any
    path: str

    def read_at(self, start: int, into: memoryview) -> None:
        while into.nbytes:
            want = min(into.nbytes, _READ_BYTES)
            data = self.fs.cat_file(self.path, start, start + want)
            if not data:
                raise EOFError(start)
            into[: len(data)] = data
            into, start = into[len(data) :], start + len(data)

    def read_pages(self, start: int, into: memoryview) -> int:
        return 0  # an object has no pages

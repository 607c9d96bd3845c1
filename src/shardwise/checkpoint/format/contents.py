"""A checkpoint that is open for reading: its files, which exist as such or are joined from parts that ranks wrote."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.format.manifest import Manifest, Part
from shardwise.checkpoint.io.storage import Directory, Location, Source, directory_of


@dataclass(frozen=True, slots=True)
class Contents:
    """A committed checkpoint."""

    directory: Directory
    manifest: Manifest

    @classmethod
    def of(cls, path: Location) -> Contents:
        """Open the checkpoint at `path`. Raises CheckpointError if there is none, or its manifest is damaged."""
        directory = directory_of(path)
        return cls(directory, manifest.read(directory))

    def __str__(self) -> str:
        return str(self.directory)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file by name; joined files are among them."""
        found = {name: record.nbytes for name, record in self.manifest.files.items()}
        return {**found, **{name: file.nbytes for name, file in self.manifest.joined.items()}}

    def check_size(self, name: str) -> None:
        """Raise CheckpointError if the file, or a file that holds a part of it, is missing or of another size."""
        joined = self.manifest.joined.get(name)
        for file in {part.file for part in joined.parts} if joined else {name}:
            manifest.check_size(self.directory, file, self.manifest.files[file])

    def read(self, name: str) -> bytes:
        """Return the content of a small file. Raises CheckpointError for a wrong checksum, OSError and EOFError."""
        manifest.check_file(self.directory, name, self.manifest.files[name])
        with manifest.reading(f"{self}/{name}"):
            return self.directory.read(name)

    @contextmanager
    def open(self, name: str) -> Iterator[Source]:
        """Open one of the files for reading byte ranges."""
        joined = self.manifest.joined.get(name)
        with ExitStack() as stack:
            if joined is None:
                yield stack.enter_context(self.directory.open(name))
            else:
                names = {part.file for part in joined.parts}
                sources = {file: stack.enter_context(self.directory.open(file)) for file in names}
                yield _JoinedSource(sorted(joined.parts), sources)


@dataclass(frozen=True, slots=True)
class _JoinedSource:
    parts: Sequence[Part]
    """Sorted by `start`, without gaps."""
    sources: Mapping[str, Source]

    def read_at(self, start: int, into: memoryview) -> None:
        at = bisect_right(self.parts, start, key=lambda part: part.start) - 1
        while into.nbytes:
            if at >= len(self.parts):
                raise EOFError(start)
            part = self.parts[at]
            length = min(into.nbytes, part.stop - start)
            self.sources[part.file].read_at(part.offset + start - part.start, into[:length])
            into, start, at = into[length:], start + length, at + 1

    def read_pages(self, start: int, into: memoryview) -> int:
        return 0  # pages of a joined file are not pages of its parts

"""The second layout: every rank writes a file of its own, from beginning to end, and writing the manifest is the
commit.

For storage that can neither write a range of a file nor rename one. A rank's file holds, one after another, the byte
ranges that it would have written into the files of the first layout; the manifest says where each byte is. So the files
of the first layout are read from it by byte range, and `consolidation.consolidate` writes them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.format.manifest import FileRecord, JoinedFile, Manifest, Part
from shardwise.checkpoint.format.tensor_files import to_write
from shardwise.checkpoint.io.checksums import RegionSums
from shardwise.checkpoint.io.remote import RemoteDirectory
from shardwise.checkpoint.publish.target import NOTE, FileSets, Written, remove_notes, write_documents
from shardwise.errors import CheckpointError, UnreadableError

BEGUN = f"{NOTE}begun"
"""Note that exists from the beginning of a save until after its commit: a directory with it and without a manifest is a
partial checkpoint."""


def file_of(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.bin"


@dataclass(frozen=True, slots=True)
class PerRankFiles:
    """A `Target` on any storage that fsspec can write to."""

    directory: RemoteDirectory

    def __str__(self) -> str:
        return str(self.directory)

    @property
    def name(self) -> str:
        """See `Target`."""
        return self.directory.url.rpartition("/")[2]

    @property
    def messages(self) -> RemoteDirectory:
        """See `Target`."""
        return self.directory

    def begin(self) -> None:
        """See `Target`."""
        names = self.directory.names()
        if names and (manifest.NAME in names or BEGUN not in names):
            raise CheckpointError(f"{self} exists already: save to another URL, or remove it first")
        self.discard()  # remains of a crash
        self.directory.make()
        self.directory.write(BEGUN, b"{}\n")

    def create(self, file_sets: FileSets) -> None:
        """See `Target`. Objects are not allocated in advance."""

    def write(self, file_sets: FileSets, rank: int) -> Written:
        """See `Target`."""
        files = [
            named for file_set in file_sets for named in to_write(file_set.files, file_set.pieces, headers=rank == 0)
        ]
        if not files:
            return Written()
        own, offset, sums, written = file_of(rank), 0, RegionSums(), Written()
        with self.directory.writing(own) as out:
            for name, ranges in files:
                parts = written.parts.setdefault(name, [])
                for start, data in ranges:
                    length = memoryview(data).nbytes
                    out.write(data)
                    sums.add(offset, data)
                    append(parts, Part(start, start + length, own, offset))
                    offset += length
        written.regions[own] = sums.regions()
        return written

    def commit(self, file_sets: FileSets, written: Written, documents: Mapping[str, bytes]) -> None:
        """See `Target`."""
        manifest.write(self.directory, manifest_of(file_sets, written, write_documents(self.directory, documents)))
        with suppress(OSError):  # it is a checkpoint now, with or without them
            remove_notes(self.directory)

    def is_committed(self) -> bool:
        """See `Target`."""
        try:
            return manifest.is_there(self.directory)
        except UnreadableError:  # the caller asks again
            return False

    def discard(self) -> None:
        """See `Target`. Only removes files of a save that was not committed."""
        names = self.directory.names()
        if BEGUN in names and manifest.NAME not in names:
            for name in sorted(names, key=lambda name: name == BEGUN):  # what marks it as partial goes last
                self.directory.remove(name)


def manifest_of(file_sets: FileSets, written: Written, small: Mapping[str, FileRecord]) -> Manifest:
    """Return the manifest of files that all ranks have written, and of the small files beside them."""
    records = {name: FileRecord(found[-1].stop, tuple(found)) for name, found in written.regions.items()}
    layouts = {name: layout for file_set in file_sets for name, layout in file_set.files.files.items()}
    joined = {name: JoinedFile(layout.nbytes, tuple(written.parts[name])) for name, layout in layouts.items()}
    return Manifest({**records, **small}, joined)


def append(parts: list[Part], part: Part) -> None:
    """Append a part, or extend the last one if the new part continues it."""
    last = parts[-1] if parts else None
    if last and (last.stop, last.offset + last.stop - last.start) == (part.start, part.offset):
        parts[-1] = last._replace(stop=part.stop)
    else:
        parts.append(part)

"""The first layout: all ranks write into the same files, at final offsets, and one rename makes them a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.format import manifest, tensor_files
from shardwise.checkpoint.format.manifest import FileRecord, Manifest
from shardwise.checkpoint.io.range_writer import RangeWriter
from shardwise.checkpoint.io.storage import LocalDirectory
from shardwise.checkpoint.publish import commit
from shardwise.checkpoint.publish.target import FileSets, Written, remove_notes, write_documents

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedFiles:
    """A `Target` on a file system that every rank sees."""

    path: Path
    replaced: int | None = None
    """Inode of the existing checkpoint that is going to be replaced; None if there is none."""

    @classmethod
    def over(cls, path: Path) -> SharedFiles:
        """Return a target that replaces the checkpoint at `path`, if there is one."""
        try:
            return cls(path, path.stat().st_ino)
        except FileNotFoundError:
            return cls(path)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """See `Target`."""
        return self.path.name

    @property
    def messages(self) -> LocalDirectory:
        """See `Target`."""
        return LocalDirectory(self._partial)

    @property
    def _partial(self) -> Path:
        return commit.partial_of(self.path)

    def begin(self) -> None:
        """See `Target`."""
        commit.begin(self.path, overwrite=self.replaced is not None)

    def create(self, file_sets: FileSets) -> None:
        """See `Target`."""
        for file_set in file_sets:
            tensor_files.create(self._partial, file_set.files)

    def write(self, file_sets: FileSets, rank: int) -> Written:
        """See `Target`."""
        written, headers = Written(), rank == 0
        with RangeWriter() as writer:
            for file_set in file_sets:
                regions = tensor_files.write(self._partial, file_set.files, file_set.pieces, headers, writer)
                written.regions.update(regions)
            writer.sync()
        mib, direct_mib = writer.written_bytes / 2**20, writer.direct_bytes / 2**20
        _log.info("%s: rank %d wrote %.1f MiB, %.1f of them past the page cache", self, rank, mib, direct_mib)
        return written

    def commit(self, file_sets: FileSets, written: Written, documents: Mapping[str, bytes]) -> None:
        """See `Target`."""
        directory = self.messages
        remove_notes(directory)
        layouts = {name: layout for file_set in file_sets for name, layout in file_set.files.files.items()}
        records = {name: FileRecord(file.nbytes, tuple(written.regions[name])) for name, file in layouts.items()}
        manifest.write(directory, Manifest(records | write_documents(directory, documents)))
        if self.replaced is None or not any(self.path.iterdir()):
            commit.commit(self.path)
        else:
            commit.commit_over(self.path)

    def is_committed(self) -> bool:
        """See `Target`. True if there is no partial directory: whoever waited for the commit may have moved the
        checkpoint since."""
        if not self._partial.exists():
            return True
        try:
            is_new = self.path.stat().st_ino != self.replaced
        except FileNotFoundError:
            return False
        return is_new and LocalDirectory(self.path).has(manifest.NAME)

    def discard(self) -> None:
        """See `Target`."""
        commit.discard(self.path)

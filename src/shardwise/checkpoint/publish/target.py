"""The place where a checkpoint is going to be: one protocol for both layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.format.manifest import FileRecord, Part
from shardwise.checkpoint.format.tensor_files import TensorFiles, WritablePiece
from shardwise.checkpoint.io.checksums import Region
from shardwise.checkpoint.io.storage import Directory

NOTE = "."
"""First character of the names of notes between ranks, which are removed before the commit."""


P_co = TypeVar("P_co", bound=WritablePiece, covariant=True)


@dataclass(frozen=True, slots=True)
class FileSet(Generic[P_co]):
    """The files of one stem (`model*`, `optimizer*`) and the pieces that this rank writes to them."""

    files: TensorFiles
    pieces: Sequence[P_co]


FileSets = Sequence[FileSet[WritablePiece]]


@dataclass(slots=True)
class Written:
    """Regions and parts that one rank, or all ranks, have written."""

    regions: dict[str, list[Region]] = field(default_factory=dict)
    """Regions with their checksums, by file."""
    parts: dict[str, list[Part]] = field(default_factory=dict)
    """Parts by the joined file whose bytes they hold."""

    def to_json(self) -> dict[str, Any]:
        """Return the same as plain dicts and lists, for `of_ranks`."""
        return asdict(self)

    @classmethod
    def of_ranks(cls, reports: Iterable[Mapping[str, Any]]) -> Written:
        """Merge the `to_json` of every rank."""
        all_ = cls()
        for report in reports:
            for name, regions in report["regions"].items():
                all_.regions.setdefault(name, []).extend(Region(*region) for region in regions)
            for name, parts in report["parts"].items():
                all_.parts.setdefault(name, []).extend(Part(*part) for part in parts)
        return all_


class Target(Protocol):
    """A place for one checkpoint. No method communicates; those marked so are called by rank 0 alone."""

    @property
    def name(self) -> str:
        """The last part of its path or URL; equal on every rank, wherever each has mounted the parent directory."""

    @property
    def messages(self) -> Directory:
        """The directory where ranks leave notes, from `begin` to `commit`."""

    def begin(self) -> None:
        """Create an empty place; remains of a crash are removed. Rank 0 only.

        Raises CheckpointError if the place holds anything but remains of a save, or, if it is to be replaced, a
        checkpoint.
        """

    def create(self, file_sets: FileSets) -> None:
        """Allocate the files, so that a full disk is an error now. Rank 0 only."""

    def write(self, file_sets: FileSets, rank: int) -> Written:
        """Write this rank's pieces (rank 0: also headers). They are on disk when this returns."""

    def commit(self, file_sets: FileSets, written: Written, documents: Mapping[str, bytes]) -> None:
        """Write the small files, the manifest last, and make it a checkpoint. Rank 0 only, after all ranks' `write`."""

    def is_committed(self) -> bool:
        """Return whether the checkpoint is committed."""

    def discard(self) -> None:
        """Remove everything that was written, if possible. Rank 0 only."""


def write_documents(directory: Directory, documents: Mapping[str, bytes]) -> dict[str, FileRecord]:
    """Write small files, given by name. They are on disk when this returns. Returns their records."""
    for name, data in documents.items():
        directory.write(name, data)
    return {name: manifest.record_of(data) for name, data in documents.items()}


def remove_notes(messages: Directory) -> None:
    """Remove the notes between ranks."""
    for name in messages.names():
        if name.startswith(NOTE):
            messages.remove(name)

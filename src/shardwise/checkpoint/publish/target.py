"""Where a checkpoint is going to be: one protocol for both layouts."""

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
    """Checksums by file."""
    parts: dict[str, list[Part]] = field(default_factory=dict)
    """By file that is to be joined: where its bytes lie."""

    def to_json(self) -> dict[str, Any]:
        """The same as plain dicts and lists, for `of_ranks`."""
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
    """A place for one checkpoint. No method communicates; rank 0 alone calls those marked so."""

    @property
    def name(self) -> str:
        """Its last name; the same on every rank, wherever each has mounted the directory above."""

    @property
    def messages(self) -> Directory:
        """Where ranks leave notes, from `begin` to `commit`."""

    def begin(self) -> None:
        """Make an empty place; remains of a crash are removed. Rank 0 only.

        Raises CheckpointError if the place holds anything but remains of a save.
        """

    def create(self, file_sets: FileSets) -> None:
        """Allocate the files, so that a full disk is an error now. Rank 0 only."""

    def write(self, file_sets: FileSets, rank: int) -> Written:
        """Write this rank's pieces, rank 0 also headers, and have them on disk."""

    def commit(self, file_sets: FileSets, written: Written, documents: Mapping[str, bytes]) -> None:
        """Write the small files, the manifest last, and make it a checkpoint. Rank 0 only, after all ranks' `write`."""

    def is_committed(self) -> bool:
        """Whether the checkpoint is there."""

    def discard(self) -> None:
        """Remove everything that was written, if that is possible. Rank 0 only."""


def write_documents(directory: Directory, documents: Mapping[str, bytes]) -> dict[str, FileRecord]:
    """Write small files, given by name, and have them on disk. Returns their records."""
    for name, data in documents.items():
        directory.write(name, data)
    return {name: manifest.record_of(data) for name, data in documents.items()}


def remove_notes(messages: Directory) -> None:
    """Remove the notes between ranks."""
    for name in messages.names():
        if name.startswith(NOTE):
            messages.remove(name)

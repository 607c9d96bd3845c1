"""Where a checkpoint is going to be: one protocol for both layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from shardwise.checkpoint.format.manifest import Part
from shardwise.checkpoint.format.tensor_files import TensorFiles, WritablePiece
from shardwise.checkpoint.io.checksums import Region
from shardwise.checkpoint.io.storage import Directory

NOTE = "."
"""What ranks have to say to one another lies in files whose names begin so; they are removed before the commit."""


P_co = TypeVar("P_co", bound=WritablePiece, covariant=True)


@dataclass(frozen=True, slots=True)
class FileSet(Generic[P_co]):
    """The files of one stem (`model*`, `optimizer*`) and what this rank writes of them."""

    files: TensorFiles
    pieces: Sequence[P_co]


FileSets = Sequence[FileSet[WritablePiece]]


@dataclass(slots=True)
class Written:
    """What a rank has written, or all of them."""

    regions: dict[str, list[Region]] = field(default_factory=dict)
    """Checksums by file."""
    parts: dict[str, list[Part]] = field(default_factory=dict)
    """By file that is to be joined: where its bytes lie."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_ranks(cls, reports: Iterable[Mapping[str, Any]]) -> Written:
        """What each rank's `to_json` gave, together."""
        all_ = cls()
        for report in reports:
            for name, regions in report["regions"].items():
                all_.regions.setdefault(name, []).extend(Region(*region) for region in regions)
            for name, parts in report["parts"].items():
                all_.parts.setdefault(name, []).extend(Part(*part) for part in parts)
        return all_


class Target(Protocol):
    """A place for one checkpoint. Every method is local, and those marked so are rank 0's to call."""

    @property
    def name(self) -> str:
        """Its last name; the same on every rank, wherever each has mounted what is above."""

    @property
    def messages(self) -> Directory:
        """Where ranks leave notes, from `begin` to `commit`."""

    def begin(self) -> None:
        """Have an empty place; what a crash left there is removed. Rank 0's.

        Raises CheckpointError if there is something that a save did not leave.
        """

    def create(self, file_sets: FileSets) -> None:
        """Make room, so that a disk without any says so now. Rank 0's."""

    def write(self, file_sets: FileSets, rank: int) -> Written:
        """Write this rank's pieces, rank 0 also headers, and have them on disk."""

    def commit(self, file_sets: FileSets, written: Written, documents: Mapping[str, bytes]) -> None:
        """Write the small files, the manifest last, and make it a checkpoint. Rank 0's, when all ranks have written."""

    def is_committed(self) -> bool:
        """Whether the checkpoint is there."""

    def discard(self) -> None:
        """Remove what was written, if that is possible. Rank 0's."""


def remove_notes(messages: Directory) -> None:
    """Remove what ranks have said."""
    for name in messages.names():
        if name.startswith(NOTE):
            messages.remove(name)

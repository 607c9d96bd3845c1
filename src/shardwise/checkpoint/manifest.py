"""`manifest.json`: every file of a checkpoint with the checksums of its regions. Without it there is no checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import xxhash

from shardwise.errors import CheckpointError
from shardwise.layout.ranges import gaps, overlaps

NAME = "manifest.json"
_FORMAT = 1
_CHECKSUM = "xxh3_64"
_REGION_BYTES = 256 * 2**20
"""Regions grow to about this, as long as what is written continues them."""
_CHUNK_BYTES = 8 * 2**20


class Region(NamedTuple):
    """Bytes [start, stop) of a file and their checksum, 16 hexadecimal digits."""

    start: int
    stop: int
    sum: str


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What one file is to hold."""

    nbytes: int
    regions: tuple[Region, ...]


class RegionSums:
    """Checksums of bytes as they are written: whatever continues the last bytes belongs to their region."""

    def __init__(self) -> None:
        self._done: list[Region] = []
        self._hash = xxhash.xxh3_64()
        self._start = self._stop = 0

    def add(self, start: int, data: Any) -> None:
        """`data` (a buffer) has been written at byte `start`."""
        if start != self._stop or self._stop - self._start >= _REGION_BYTES:
            self._close()
            self._start = self._stop = start
        self._hash.update(data)
        self._stop += memoryview(data).nbytes

    def regions(self) -> list[Region]:
        """All of them, in the order of writing."""
        self._close()
        self._start = self._stop
        return list(self._done)

    def _close(self) -> None:
        if self._stop > self._start:
            self._done.append(Region(self._start, self._stop, self._hash.hexdigest()))
        self._hash.reset()


def record_of(path: Path) -> FileRecord:
    """The record of a file that one process wrote: read back, a single region."""
    data = path.read_bytes()
    regions = (Region(0, len(data), xxhash.xxh3_64_hexdigest(data)),) if data else ()
    return FileRecord(len(data), regions)


def write(directory: Path, files: Mapping[str, FileRecord]) -> None:
    """Write the manifest of `directory` and have it on disk before this returns."""
    described = {
        name: {"bytes": file.nbytes, "regions": [list(region) for region in sorted(file.regions)]}
        for name, file in sorted(files.items())
    }
    document = {"format": _FORMAT, "checksum": _CHECKSUM, "files": described}
    with (directory / NAME).open("w", encoding="utf-8") as file:
        json.dump(document, file)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def read(directory: Path) -> dict[str, FileRecord]:
    """The files of the checkpoint `directory`. Raises CheckpointError if it is none or its manifest is damaged."""
    path = directory / NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        what = "has no manifest.json, so it is not a committed checkpoint" if directory.is_dir() else "does not exist"
        raise CheckpointError(f"{directory} {what}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    try:
        document = json.loads(text)
        if document["format"] != _FORMAT or document["checksum"] != _CHECKSUM:
            raise ValueError(f"format {document['format']!r} with checksum {document['checksum']!r} is not known")
        return {_plain_name(name): _record(entry) for name, entry in document["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def _plain_name(name: str) -> str:
    if name != os.path.basename(name) or name in {"", ".", "..", NAME} or "\0" in name or "\\" in name:  # noqa: PTH119
        raise ValueError(f"{name!r} is not the name of a file in the checkpoint")
    return name


def _record(entry: Any) -> FileRecord:
    regions = tuple(Region(int(start), int(stop), str(sum_)) for start, stop, sum_ in entry["regions"])
    return FileRecord(int(entry["bytes"]), regions)


def verify(path: str | os.PathLike[str]) -> None:
    """Read a whole checkpoint and compare every byte's checksum. Local: one process is enough.

    Raises:
        CheckpointError: a file is missing or has another size, a region of one is in no checksum or does not match its
            own; the message names the file and the bytes.
    """
    directory = Path(path)
    files = read(directory)
    if not files:
        raise CheckpointError(f"{directory / NAME} is damaged: it names no files")
    for name, record in files.items():
        check_size(directory / name, record)
        _check_tiling(directory / name, record)
    for name, record in files.items():
        with (directory / name).open("rb") as file:
            _check_sums(directory / name, file, record)


def check_size(path: Path, record: FileRecord) -> None:
    """Raise CheckpointError if a file is missing or not as long as the manifest says."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; the manifest promises {record.nbytes} bytes") from None
    if found != record.nbytes:
        kind = "truncated" if found < record.nbytes else "too long"
        raise CheckpointError(f"{path} is {kind}: {found} bytes, not {record.nbytes}")


def _check_tiling(path: Path, record: FileRecord) -> None:
    ranges = [(region.start, region.stop) for region in record.regions]
    for start, stop in gaps(ranges, (0, record.nbytes)):
        raise CheckpointError(f"{path}: the manifest has no checksum for bytes [{start}, {stop})")
    beyond = [(start, stop) for start, stop in ranges if start < 0 or stop > record.nbytes or stop <= start]
    for start, stop in (*beyond, *overlaps(ranges)):
        raise CheckpointError(f"{path}: the manifest's checksums for bytes [{start}, {stop}) cannot be right")


def _check_sums(path: Path, file: IO[bytes], record: FileRecord) -> None:
    for region in sorted(record.regions):
        file.seek(region.start)
        found = _sum(_chunks(file, region.stop - region.start))
        if found != region.sum:
            raise CheckpointError(
                f"{path} is damaged: bytes [{region.start}, {region.stop}) have the checksum {found}, not {region.sum}"
            )


def _chunks(file: IO[bytes], nbytes: int) -> Iterable[bytes]:
    while nbytes > 0 and (chunk := file.read(min(nbytes, _CHUNK_BYTES))):
        nbytes -= len(chunk)
        yield chunk


def _sum(chunks: Iterable[bytes]) -> str:
    total = xxhash.xxh3_64()
    for chunk in chunks:
        total.update(chunk)
    return total.hexdigest()

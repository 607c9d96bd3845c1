"""`manifest.json`: every file of a checkpoint with the checksums of its regions. Without it there is no checkpoint.

    {"format": 1, "checksum": "xxh3_64", "sum": its own,
     "files": {name: {"bytes": n, "regions": [[start, stop, sum], ...]}}}

Its own sum is the checksum of this JSON without "sum", with sorted keys and no white space; if it is missing, nothing
is compared.

If ranks could not write into the same files, there is also

    "joined": {name: {"bytes": n, "parts": [[start, stop, file, offset], ...]}}

where bytes [start, stop) of what would be the file `name` are stored in `file` from byte `offset` on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xxhash

from shardwise.checkpoint.io.checksums import Region
from shardwise.checkpoint.io.storage import Directory, Location, Source, directory_of
from shardwise.checkpoint.ranks import save_thread
from shardwise.errors import CheckpointError, UnreadableError
from shardwise.layout.ranges import gaps, overlaps

NAME = "manifest.json"
_FORMAT = 1
_KEYS = {"format", "checksum", "files", "joined", "sum"}
_CHECKSUM = "xxh3_64"
_CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and checksums of one file."""

    nbytes: int
    regions: tuple[Region, ...]


class Part(NamedTuple):
    """Bytes [start, stop) of a joined file, which are stored in `file` from byte `offset` on."""

    start: int
    stop: int
    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class JoinedFile:
    """A file that does not exist as such: its bytes are stored in other files."""

    nbytes: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a checkpoint."""

    files: Mapping[str, FileRecord]
    joined: Mapping[str, JoinedFile] = field(default_factory=dict)


def record_of(data: bytes) -> FileRecord:
    """Return the record of a small file: a single region."""
    regions = (Region(0, len(data), xxhash.xxh3_64_hexdigest(data)),) if data else ()
    return FileRecord(len(data), regions)


def write(directory: Directory, manifest: Manifest) -> None:
    """Write the manifest. It is on disk when this returns."""
    document: dict[str, Any] = {
        "format": _FORMAT,
        "checksum": _CHECKSUM,
        "files": {
            name: {"bytes": file.nbytes, "regions": [list(region) for region in sorted(file.regions)]}
            for name, file in sorted(manifest.files.items())
        },
    }
    if manifest.joined:
        document["joined"] = {
            name: {"bytes": file.nbytes, "parts": [list(part) for part in sorted(file.parts)]}
            for name, file in sorted(manifest.joined.items())
        }
    document["sum"] = _own_sum(document)
    directory.write(NAME, (json.dumps(document) + "\n").encode())


def read(directory: Directory) -> Manifest:
    """Read a checkpoint's manifest. Raises CheckpointError if there is no checkpoint or its manifest is damaged."""
    found, document = _read(directory)
    _check_own_sum(directory, document)
    return found


def _read(directory: Directory) -> tuple[Manifest, dict[str, Any]]:
    """Return the manifest, each entry of which is plausible, and its JSON, whose own checksum is not compared."""
    path = f"{directory}/{NAME}"
    try:
        with reading(path):
            text = directory.read(NAME)
    except FileNotFoundError:
        what = "does not exist or is empty"
        if directory.names():
            what = "has no manifest.json, so it is not a committed checkpoint"
        raise CheckpointError(f"{directory} {what}") from None
    except NotADirectoryError:
        raise CheckpointError(f"{directory} is not a directory, so it is not a checkpoint") from None
    except UnreadableError as error:
        if not isinstance(error.__cause__, IsADirectoryError):
            raise
        raise CheckpointError(f"{path} is damaged: it is a directory") from None
    try:
        document = json.loads(text.decode(), object_pairs_hook=_without_repetition)
        if document["format"] != _FORMAT or document["checksum"] != _CHECKSUM:
            raise ValueError(f"format {document['format']!r} with checksum {document['checksum']!r} is unknown")
        unknown = document.keys() - _KEYS
        if unknown:
            raise ValueError(f"it has {min(unknown)!r}, which this version does not know")
        files = {plain_name(name): _record(entry) for name, entry in document["files"].items()}
        joined = {plain_name(name): _joined(entry) for name, entry in document.get("joined", {}).items()}
        for name, file in joined.items():
            _check_parts(name, file, files)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    return Manifest(files, joined), document


def _own_sum(document: Mapping[str, Any]) -> str:
    """Return the checksum of the document's content, independent of its white space and the order of its keys."""
    rest = {key: value for key, value in document.items() if key != "sum"}
    return xxhash.xxh3_64_hexdigest(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


def _check_own_sum(directory: Directory, document: Mapping[str, Any]) -> None:
    found = _own_sum(document)
    if document.get("sum", found) != found:
        raise CheckpointError(f"{directory}/{NAME} is damaged: its checksum is {found}, but it says {document['sum']}")


def is_there(directory: Directory) -> bool:
    """Return whether a checkpoint was committed in `directory`. A manifest that is incomplete, or is not a file, does
    not count.

    Raises UnreadableError if that cannot be told.
    """
    try:
        with reading(f"{directory}/{NAME}"):
            json.loads(directory.read(NAME))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except UnreadableError as error:
        if isinstance(error.__cause__, IsADirectoryError):
            return False
        raise
    return True


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Raise OSErrors in the block as UnreadableError, except those for a missing file or directory.

    The message names the file of the error or, if it has none, `path`.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise UnreadableError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error


@contextmanager
def reading_data(path: object) -> Iterator[None]:
    """Like `reading`; and raise CheckpointError if the file is missing, or an EOFError says that it ends too early."""
    try:
        with reading(path):
            yield
    except EOFError as error:
        raise CheckpointError(f"{path} ends at byte {error}, before the end of its tensor data") from None
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} is missing") from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict. Raises ValueError for equal names: JSON readers keep the last, and the first would go
    unchecked."""
    named: dict[str, Any] = {}
    for name, value in pairs:
        if name in named:
            raise ValueError(f"it has {name!r} twice")
        named[name] = value
    return named


def plain_name(name: str) -> str:
    """Return the name itself. Raises ValueError if a file in a checkpoint cannot have it."""
    if name != os.path.basename(name) or name in {"", ".", "..", NAME} or "\0" in name or "\\" in name:  # noqa: PTH119
        raise ValueError(f"{name!r} cannot be the name of a file in the checkpoint")
    return name


def _record(entry: Any) -> FileRecord:
    regions = tuple(Region(int(start), int(stop), str(sum_)) for start, stop, sum_ in entry["regions"])
    return FileRecord(int(entry["bytes"]), regions)


def _joined(entry: Any) -> JoinedFile:
    parts = tuple(Part(int(start), int(stop), str(file), int(offset)) for start, stop, file, offset in entry["parts"])
    return JoinedFile(int(entry["bytes"]), parts)


def _check_parts(name: str, joined: JoinedFile, files: Mapping[str, FileRecord]) -> None:
    """Raise ValueError unless every byte is stored exactly once, and in a file of the checkpoint."""
    if name in files:
        raise ValueError(f"{name!r} is both a file and joined from other files")
    reached = 0
    for part in sorted(joined.parts):
        if part.start != reached or part.stop <= part.start:
            raise ValueError(f"bytes [{part.start}, {part.stop}) of {name!r} do not follow byte {reached}")
        if part.file not in files or not 0 <= part.offset <= files[part.file].nbytes - (part.stop - part.start):
            raise ValueError(f"bytes [{part.start}, {part.stop}) of {name!r} are not in {part.file!r}")
        reached = part.stop
    if reached != joined.nbytes:
        raise ValueError(f"bytes [{reached}, {joined.nbytes}) of {name!r} are in none of its parts")


def verify(path: Location, progress: Callable[[int, int], None] | None = None) -> None:
    """Read a whole checkpoint and compare every byte's checksum. No communication: one process is enough.

    A save that is under way in this process is waited for, and its error is raised here.

    Args:
        path: the checkpoint's path or URL.
        progress: called with the number of bytes read so far, and the number of all bytes.

    Raises:
        CheckpointError: a file is missing or has another size, some of its bytes have no checksum, or a region does not
            match its checksum; the message names the file and the bytes. UnreadableError: a file exists and cannot be
            read.
    """
    for error in damage(path, progress=progress):
        raise error


def damage(
    path: Location, quick: bool = False, progress: Callable[[int, int], None] | None = None
) -> Iterator[CheckpointError]:
    """Yield the first fault of each file of a checkpoint; nothing if it is intact. No communication.

    Args:
        path: the checkpoint's path or URL.
        quick: check sizes and the manifest only, without reading the files.
        progress: called with the number of bytes read so far, and the number of all bytes.

    Raises CheckpointError if there is no checkpoint, or its manifest is malformed; UnreadableError if storage does
    not answer: a network file system that is unavailable for a moment has damaged nothing.
    """
    save_thread.wait()
    directory = directory_of(path)
    found, document = _read(directory)
    if not found.files:
        yield CheckpointError(f"{directory}/{NAME} is damaged: it names no files")
    good: dict[str, FileRecord] = {}
    for name, record in found.files.items():
        try:
            check_size(directory, name, record)
            _check_tiling(f"{directory}/{name}", record)
            good[name] = record
        except UnreadableError:
            raise
        except CheckpointError as error:
            yield error
    if not quick:
        yield from _damaged_sums(directory, good, progress or (lambda done, total: None))
    try:
        _check_own_sum(directory, document)
    except CheckpointError as error:
        yield error


def _damaged_sums(
    directory: Directory, files: Mapping[str, FileRecord], progress: Callable[[int, int], None]
) -> Iterator[CheckpointError]:
    total = sum(record.nbytes for record in files.values())
    before = 0
    for name, record in files.items():
        path = f"{directory}/{name}"
        try:
            with reading(path), directory.open(name) as file:
                for start, chunk in checked_chunks(path, file, record):
                    progress(before + start + chunk.nbytes, total)
        except UnreadableError:
            raise
        except CheckpointError as error:
            yield error
        except EOFError as error:
            yield CheckpointError(f"{path} is truncated: it ends at byte {error}, not {record.nbytes}")
        except (FileNotFoundError, NotADirectoryError):
            yield CheckpointError(f"{path} is missing; the manifest lists {record.nbytes} bytes")
        before += record.nbytes


def check_size(directory: Directory, name: str, record: FileRecord) -> None:
    """Raise CheckpointError if a file is missing or does not have the size that the manifest gives."""
    try:
        with reading(f"{directory}/{name}"):
            found = directory.size(name)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{directory}/{name} is missing; the manifest lists {record.nbytes} bytes") from None
    if found != record.nbytes:
        kind = "truncated" if found < record.nbytes else "too long"
        raise CheckpointError(f"{directory}/{name} is {kind}: {found} bytes, not {record.nbytes}")


def check_file(directory: Directory, name: str, record: FileRecord) -> None:
    """Read a whole file. Raises CheckpointError if any byte of it does not match the manifest."""
    path = f"{directory}/{name}"
    check_size(directory, name, record)
    _check_tiling(path, record)
    with reading(path), directory.open(name) as file:
        for _ in checked_chunks(path, file, record):
            pass


def _check_tiling(path: str, record: FileRecord) -> None:
    ranges = [(region.start, region.stop) for region in record.regions]
    for start, stop in gaps(ranges, (0, record.nbytes)):
        raise CheckpointError(f"{path}: the manifest has no checksum for bytes [{start}, {stop})")
    beyond = [(start, stop) for start, stop in ranges if start < 0 or stop > record.nbytes or stop <= start]
    for start, stop in (*beyond, *overlaps(ranges)):
        raise CheckpointError(f"{path}: the manifest's checksums for bytes [{start}, {stop}) are invalid")


def checked_chunks(path: str, file: Source, record: FileRecord) -> Iterator[tuple[int, memoryview]]:
    """Yield a whole file by region, at most 8 MiB at a time: first byte, and bytes. The memory is reused for the next
    ones.

    Raises CheckpointError at the end of the first region that has another checksum, UnreadableError, and EOFError with
    the position if the file ends too early.
    """
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, record.nbytes)))
    for region in sorted(record.regions):
        total = xxhash.xxh3_64()
        for start in range(region.start, region.stop, _CHUNK_BYTES):
            chunk = buffer[: min(_CHUNK_BYTES, region.stop - start)]
            with reading(path):
                file.read_at(start, chunk)
            total.update(chunk)
            yield start, chunk
        if total.hexdigest() != region.sum:
            raise CheckpointError(
                f"{path} is damaged: bytes [{region.start}, {region.stop}) have the checksum "
                f"{total.hexdigest()}, not {region.sum}"
            )

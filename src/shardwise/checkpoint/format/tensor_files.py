"""The safetensors files of one stem (`model*`, `optimizer*`): planned, written and read by byte range. No torch."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.format.contents import Contents
from shardwise.checkpoint.format.safetensors_layout import (
    LENGTH_BYTES,
    RESERVED,
    StoredTensor,
    TensorFile,
    header_bytes,
    lay_out,
    parse,
    split,
)
from shardwise.checkpoint.io.checksums import Region
from shardwise.checkpoint.io.range_reader import Buffers, RangeReader
from shardwise.checkpoint.io.range_writer import Ranges, RangeWriter
from shardwise.checkpoint.io.storage import Directory, Source
from shardwise.checkpoint.names.index_map import IndexMap, Place
from shardwise.errors import CheckpointError, UsageError
from shardwise.files.local_file import allocate

METADATA = {"format": "pt"}
MODEL, ADAPTER, OPTIMIZER = "model", "adapter_model", "optimizer"
"""Stems of file names. `ADAPTER` is PEFT's own, for adapters without their base."""
ADAPTER_CONFIG = "adapter_config.json"
"""The file beside those of the stem `ADAPTER`."""


class WritablePiece(Protocol):
    """The part of a tensor that this process writes: a range of its elements, row-major."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the model's state_dict; several are tied."""

    @property
    def name(self) -> str:
        """The first of `names`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""

    @property
    def places(self) -> tuple[Place, ...]:
        """The stored tensors that hold its elements."""

    @property
    def stored(self) -> Sequence[StoredTensor]:
        """The stored tensors, whole, in the order of `places`."""

    def held_at(self, place: Place) -> IndexMap:
        """Return the map from the elements of a stored tensor that this process holds to the process's own, flattened,
        counted from its first."""

    def chunks(self, runs: IndexMap) -> Iterator[tuple[int, memoryview]]:
        """Yield (first element of the stored tensor, bytes of the elements from there on), in the order of `runs`."""


class ReadablePiece(Protocol):
    """The part of a tensor that this process reads."""

    @property
    def is_whole(self) -> bool:
        """Whether every rank reads all of it."""

    def begin_overwrite(self) -> bool:
        """Note that the elements are about to change. Returns whether the piece has any."""

    def fill(self, reader: RangeReader, layout: TensorFile, place: Place, past_cache: bool) -> Read:
        """Read the elements of one place, cast to the piece's dtype. They may have arrived only after
        `reader.finish()`."""


@dataclass(frozen=True)
class TensorFiles:
    """The files of one stem by name, in order, each with its layout."""

    stem: str
    files: dict[str, TensorFile]

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """All stored tensors, by name."""
        return {name: tensor for layout in self.files.values() for name, tensor in layout.tensors.items()}

    def file_of(self, name: str) -> str:
        """Return the file that holds a tensor, which must be in one of them."""
        return next(file for file, layout in self.files.items() if name in layout.tensors)

    @property
    def index(self) -> bytes:
        """The content of `<stem>.safetensors.index.json`."""
        stored = self.tensors.values()
        document = {
            "metadata": {
                "total_parameters": sum(tensor.numel for tensor in stored),
                "total_size": sum(tensor.nbytes for tensor in stored),
            },
            "weight_map": {name: file for file, layout in self.files.items() for name in layout.tensors},
        }
        return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def indexes(directory: Sequence[TensorFiles]) -> dict[str, bytes]:
    """Return the indexes that a directory needs, by name of the file: of each stem with several files, and of the model
    if another stem's files are beside it. vLLM and SGLang read every safetensors file of a directory, also the
    optimizer's, unless an index names the model's."""
    return {
        f"{files.stem}.safetensors.index.json": files.index
        for files in directory
        if len(files.files) > 1 or (files.stem == MODEL and len(directory) > 1)
    }


def files_for(stem: str, pieces: Iterable[WritablePiece], max_file_bytes: int) -> TensorFiles:
    """Lay tensors out in files of at most `max_file_bytes`. The same on every rank.

    Raises UsageError for a stored tensor that consists of tensors of several dtypes, or has more elements in pieces
    than it holds.
    """
    stored: dict[str, StoredTensor] = {}
    filled: dict[str, int] = {}
    for piece in pieces:
        for place, tensor in zip(piece.places, piece.stored, strict=True):
            if (known := filled.get(tensor.name, 0)) + place.runs.numel > tensor.numel:
                raise UsageError(
                    f"{piece.name!r} is stored as part of {tensor.name!r}, but {known} of its {tensor.numel} "
                    "elements are stored by another tensor: give the two different names"
                )
            filled[tensor.name] = known + place.runs.numel
            if stored.setdefault(tensor.name, tensor) != tensor:
                raise UsageError(
                    f"{piece.name!r} is stored as part of {tensor.name!r} in {tensor.dtype}, but another part is "
                    f"stored in {stored[tensor.name].dtype}: give both the same dtype"
                )
    return lay_out_files(stem, tuple(stored.values()), max_file_bytes)


@functools.lru_cache(maxsize=8)
def lay_out_files(stem: str, tensors: tuple[StoredTensor, ...], max_file_bytes: int) -> TensorFiles:
    """Lay `tensors` out, in their order, in files of at most `max_file_bytes` each.

    Raises CheckpointError for a name that no file can hold.
    """
    if any(tensor.name == RESERVED for tensor in tensors):
        raise CheckpointError(f"a tensor is named {RESERVED!r}, which is reserved in safetensors files: rename it")
    parts = split(tensors, max_file_bytes)
    names = [f"{stem}-{k:05d}-of-{len(parts):05d}.safetensors" for k in range(1, len(parts) + 1)]
    if len(parts) == 1:
        names = [f"{stem}.safetensors"]
    return TensorFiles(stem, {name: lay_out(part, METADATA) for name, part in zip(names, parts, strict=True)})


# Writing --------------------------------------------------------------------------------------------------------------


def create(directory: Path, files: TensorFiles) -> None:
    """Create the files in their full size, so that a full disk is an error now. Called on one rank."""
    for name, layout in files.files.items():
        with (directory / name).open("xb") as file:
            allocate(file.fileno(), layout.nbytes)


def write(
    directory: Path, files: TensorFiles, pieces: Iterable[WritablePiece], headers: bool, writer: RangeWriter
) -> dict[str, list[Region]]:
    """Write all of `pieces`, and if `headers` the files' headers, in their final place. No communication. On disk after
    `writer.sync()`.

    Returns the checksums of the written bytes by file.
    """
    return {name: writer.write(directory / name, ranges) for name, ranges in to_write(files, pieces, headers)}


def to_write(files: TensorFiles, pieces: Iterable[WritablePiece], headers: bool) -> Iterator[tuple[str, Ranges]]:
    """Yield the files in which `pieces` (and if `headers`, their headers) have bytes, each with these bytes."""
    by_name: dict[str, list[tuple[WritablePiece, IndexMap]]] = {}
    for piece in pieces:
        for place in piece.places:
            runs = piece.held_at(place)
            if len(runs):
                by_name.setdefault(place.name, []).append((piece, runs))
    for name, layout in files.files.items():
        own = [(tensor, piece, runs) for tensor in layout.tensors for piece, runs in by_name.get(tensor, ())]
        if own or headers:
            yield name, _ranges(layout, own, headers)


def _ranges(layout: TensorFile, own: Iterable[tuple[str, WritablePiece, IndexMap]], header: bool) -> Ranges:
    if header:
        yield 0, layout.header
    for tensor, piece, runs in own:
        for start, data in piece.chunks(runs):
            yield layout.byte_range(tensor, start, start).start, data


# Reading --------------------------------------------------------------------------------------------------------------


def find(contents: Contents, stem: str) -> TensorFiles:
    """Find a checkpoint's files of one stem, and read their headers.

    Raises CheckpointError, naming the file, if one is missing, truncated or has a header that cannot be right.
    """
    sizes = contents.sizes
    names = [name for name in sorted(sizes) if name.endswith(".safetensors") and stem_of(name) == stem]
    files: dict[str, TensorFile] = {}
    for name in names:
        contents.check_size(name)
        with manifest.reading(f"{contents}/{name}"), contents.open(name) as source:
            files[name] = read_layout(f"{contents}/{name}", source, sizes[name])
    return TensorFiles(stem, files)


def find_model(contents: Contents) -> TensorFiles:
    """Find the files of a checkpoint's model, or of its adapter if it was saved without its base. Raises as `find`."""
    adapter = find(contents, ADAPTER)
    return adapter if adapter.files else find(contents, MODEL)


def stem_of(name: str) -> str:
    """Return the stem of a file's name."""
    return name.split(".")[0].split("-")[0]


def read_layout(path: str, source: Source, nbytes: int) -> TensorFile:
    """Read the layout in a safetensors file's header. Raises CheckpointError, naming the file, if it is malformed."""
    try:
        prefix = _read_bytes(source, 0, min(LENGTH_BYTES, nbytes))
        header = prefix + _read_bytes(source, LENGTH_BYTES, header_bytes(prefix, nbytes) - LENGTH_BYTES)
        return parse(header, nbytes)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def _read_bytes(source: Source, start: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    source.read_at(start, memoryview(data))
    return bytes(data)


class Read(NamedTuple):
    """Statistics of a `read` on this rank."""

    read_bytes: int
    """Bytes of elements; those between them do not count."""
    peak_staged_bytes: int
    """Most memory held at one time for elements that could not be read straight into a piece."""
    direct_bytes: int = 0
    """Those of `read_bytes` that were read past the page cache."""


def read(
    contents: Contents | Directory,
    files: TensorFiles,
    wanted: Iterable[tuple[ReadablePiece, Place]],
    past_cache: bool = False,
) -> Read:
    """Fill pieces with the elements stored at the places given, cast to the pieces' dtypes. No communication.

    Each rank reads the bytes of its own elements; past the page cache it reads whole pages, with a few other bytes in
    them.

    past_cache: read pages past the page cache, unless it has them already. Right if no other process of this machine is
        going to read the same elements soon. Pieces that all ranks hold are read through the cache nevertheless.
    """
    by_file: dict[str, list[tuple[ReadablePiece, Place]]] = {}
    for piece, place in wanted:
        if piece.begin_overwrite():
            by_file.setdefault(files.file_of(place.name), []).append((piece, place))
    read_bytes = peak_staged_bytes = direct_bytes = 0
    buffers = Buffers()
    for file, pieces in by_file.items():
        layout, path = files.files[file], f"{contents}/{file}"
        with manifest.reading_data(path), contents.open(file) as source, RangeReader(source, buffers) as reader:
            for piece, place in sorted(pieces, key=lambda item: layout.starts[item[1].name]):
                done = piece.fill(reader, layout, place, past_cache and not piece.is_whole)
                read_bytes += done.read_bytes
                peak_staged_bytes = max(peak_staged_bytes, done.peak_staged_bytes)
            reader.finish()
            direct_bytes += reader.direct_bytes
    return Read(read_bytes, peak_staged_bytes, direct_bytes)

"""The safetensors files of one kind (`model*`, `optimizer*`): planned, written and read by byte range."""

from __future__ import annotations

import errno
import functools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.format.contents import Contents
from shardwise.checkpoint.format.local_tensor import DTYPES, Piece
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

METADATA = {"format": "pt"}
_CHUNK_BYTES = 32 * 2**20
"""Staged at once where a piece cannot be written, or read into, as it lies in memory."""


@dataclass(frozen=True)
class TensorFiles:
    """Files by name, each with its layout, in order."""

    stem: str
    files: dict[str, TensorFile]

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """All of them, by name."""
        return {name: tensor for layout in self.files.values() for name, tensor in layout.tensors.items()}

    def file_of(self, name: str) -> str:
        """The file that holds a tensor, which must be in one."""
        return next(file for file, layout in self.files.items() if name in layout.tensors)

    @property
    def index(self) -> dict[str, bytes]:
        """`<stem>.safetensors.index.json`, by that name, where there are several files."""
        if len(self.files) == 1:
            return {}
        stored = self.tensors.values()
        document = {
            "metadata": {
                "total_parameters": sum(tensor.numel for tensor in stored),
                "total_size": sum(tensor.nbytes for tensor in stored),
            },
            "weight_map": {name: file for file, layout in self.files.items() for name in layout.tensors},
        }
        return {f"{self.stem}.safetensors.index.json": (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()}


def plan(stem: str, pieces: Sequence[Piece], max_file_bytes: int) -> TensorFiles:
    """Lay tensors out in files of at most `max_file_bytes`. The same on every rank.

    Raises UsageError for a stored tensor that is made of tensors of several dtypes.
    """
    stored: dict[str, StoredTensor] = {}
    for piece in pieces:
        for tensor in piece.stored:
            if stored.setdefault(tensor.name, tensor) != tensor:
                raise UsageError(
                    f"{tensor.name!r} is stored with {piece.name!r} in it, as {tensor.dtype}, and with something else "
                    f"as {stored[tensor.name].dtype}: give both the same dtype"
                )
    return lay_out_files(stem, tuple(stored.values()), max_file_bytes)


@functools.lru_cache(maxsize=8)
def lay_out_files(stem: str, tensors: tuple[StoredTensor, ...], max_file_bytes: int) -> TensorFiles:
    """The files that hold `tensors`, in their order, of at most `max_file_bytes` each.

    Raises CheckpointError for a name that no file can hold.
    """
    if any(tensor.name == RESERVED for tensor in tensors):
        raise CheckpointError(f"a tensor is called {RESERVED!r}, which files keep for themselves: rename it")
    parts = split(tensors, max_file_bytes)
    names = [f"{stem}-{k:05d}-of-{len(parts):05d}.safetensors" for k in range(1, len(parts) + 1)]
    if len(parts) == 1:
        names = [f"{stem}.safetensors"]
    return TensorFiles(stem, {name: lay_out(part, METADATA) for name, part in zip(names, parts, strict=True)})


# Writing --------------------------------------------------------------------------------------------------------------


def create(directory: Path, files: TensorFiles) -> None:
    """Make the files in their full size, so that a disk without room says so now. One rank does it."""
    for name, layout in files.files.items():
        fd = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _allocate(fd, layout.nbytes)
        finally:
            os.close(fd)


def _allocate(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            raise
        os.ftruncate(fd, nbytes)


def write(
    directory: Path, files: TensorFiles, pieces: Iterable[Piece], headers: bool, writer: RangeWriter
) -> dict[str, list[Region]]:
    """Write all of `pieces`, and the `headers`, in their final place. Local. On disk after `writer.sync()`.

    Returns, by file, the checksums of what was written.
    """
    return {name: writer.write(directory / name, ranges) for name, ranges in to_write(files, pieces, headers)}


def to_write(files: TensorFiles, pieces: Iterable[Piece], headers: bool) -> Iterator[tuple[str, Ranges]]:
    """The files that `pieces`, and the `headers`, have bytes in, each with these."""
    by_name: dict[str, list[tuple[Piece, IndexMap]]] = {}
    for piece in pieces:
        for place in piece.places:
            runs = piece.held_at(place)
            if len(runs):
                by_name.setdefault(place.name, []).append((piece, runs))
    for name, layout in files.files.items():
        own = [(tensor, piece, runs) for tensor in layout.tensors for piece, runs in by_name.get(tensor, ())]
        if own or headers:
            yield name, _ranges(layout, own, headers)


def _ranges(layout: TensorFile, own: Iterable[tuple[str, Piece, IndexMap]], header: bool) -> Ranges:
    if header:
        yield 0, layout.header
    for tensor, piece, runs in own:
        for start, data in _chunks(piece, runs):
            yield layout.byte_range(tensor, start, start).start, data


def _chunks(piece: Piece, runs: IndexMap) -> Iterator[tuple[int, memoryview]]:
    """Elements of a stored tensor and their bytes, without a copy where they lie in this process's memory in order."""
    flat = piece.tensor.reshape(-1)
    for part in runs.stretches(_step(flat, runs)):
        values = _at(flat, part).cpu().resolve_conj().resolve_neg()  # else their bytes say something else
        yield int(part.here[0]), _bytes(values.contiguous())


def _at(flat: Tensor, part: IndexMap) -> Tensor:
    """The elements there: a view of them where they are one run."""
    if len(part) == 1:
        return flat[int(part.there[0]) : int(part.there[0] + part.length[0])]
    return flat[torch.from_numpy(part.elements()).to(flat.device)]


def _step(flat: Tensor, runs: IndexMap) -> int:
    """Elements to take at once; where they are gathered their numbers, 8 bytes each, are staged too."""
    return max(1, _CHUNK_BYTES // (flat.itemsize if len(runs) == 1 else flat.itemsize + 8))


def _bytes(flat: Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


# Reading --------------------------------------------------------------------------------------------------------------


def find(contents: Contents, stem: str) -> TensorFiles:
    """The files of one kind that a checkpoint has, by their own headers.

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


def stem_of(name: str) -> str:
    """Of which kind a file is."""
    return name.split(".")[0].split("-")[0]


def read_layout(path: str, source: Source, nbytes: int) -> TensorFile:
    """What a safetensors file's header says. Raises CheckpointError, naming the file, if it cannot be right."""
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
    """What `read` did on this rank."""

    read_bytes: int
    """Of elements; of what lies between them none counts."""
    peak_staged_bytes: int
    """Most memory held at one time for what could not be read into a piece as it lies."""
    direct_bytes: int = 0
    """Of `read_bytes`, those that came past the page cache."""


def read(
    contents: Contents | Directory, files: TensorFiles, wanted: Iterable[tuple[Piece, Place]], past_cache: bool = False
) -> Read:
    """Fill pieces with the elements stored at the places given, cast to the pieces' dtypes. Local.

    Each rank reads the bytes of its own elements; past the page cache whole pages, with the few that lie between.

    past_cache: read that way what is not in the page cache. Right where nobody on this machine is going to read the
        same elements soon. What all ranks hold is read through it.
    """
    by_file: dict[str, list[tuple[Piece, Place]]] = {}
    for piece, place in wanted:
        torch.autograd.graph.increment_version(piece.tensor)  # also of empty ones: ranks must see the same change
        if piece.tensor.numel():
            by_file.setdefault(files.file_of(place.name), []).append((piece, place))
    read_bytes = peak_staged_bytes = direct_bytes = 0
    buffers = Buffers()
    for file, pieces in by_file.items():
        layout, path = files.files[file], f"{contents}/{file}"
        try:
            with manifest.reading(path), contents.open(file) as source, RangeReader(source, buffers) as reader:
                for piece, place in sorted(pieces, key=lambda item: layout.starts[item[1].name]):
                    done = _fill(reader, layout, piece, place, past_cache and not piece.is_whole)
                    read_bytes += done.read_bytes
                    peak_staged_bytes = max(peak_staged_bytes, done.peak_staged_bytes)
                reader.finish()
                direct_bytes += reader.direct_bytes
        except EOFError as error:
            raise CheckpointError(f"{path} ends at byte {error}, before tensor data that it holds") from None
    return Read(read_bytes, peak_staged_bytes, direct_bytes)


def _fill(reader: RangeReader, layout: TensorFile, piece: Piece, place: Place, past_cache: bool) -> Read:
    """Fill a piece with its elements of one place; what needs no staging is there after `reader.finish()`."""
    dtype, target = DTYPES[layout.tensors[place.name].dtype], piece.tensor
    flat = target.view(-1) if target.is_contiguous() else target.flatten()  # one, or a copy
    runs = piece.held_at(place)
    as_stored = flat.dtype == dtype and flat.device.type == "cpu" and not (flat.is_conj() or flat.is_neg())
    in_place = target.is_contiguous() and len(runs) == 1 and as_stored
    step = max(1, runs.numel) if in_place else _step(torch.empty(0, dtype=dtype, device="cpu"), runs)
    staged_bytes = 0
    for part in runs.stretches(step):
        chunk = _at(flat, part) if in_place else torch.empty(part.numel, dtype=dtype, device="cpu")
        start = int(part.here[0])
        reader.ask(layout.byte_range(place.name, start, start).start, _bytes(chunk), past_cache)
        if not in_place:
            reader.finish()
            staged_bytes = max(staged_bytes, _put(chunk, flat, part))
    if not target.is_contiguous():
        target.copy_(flat.view(target.shape))
        staged_bytes += flat.nbytes
    return Read(runs.numel * dtype.itemsize, staged_bytes)


def _put(chunk: Tensor, flat: Tensor, part: IndexMap) -> int:
    """Copy what was read to where it belongs. Returns the bytes that were staged for that, the chunk among them."""
    if len(part) == 1:
        _at(flat, part).copy_(chunk)
        return chunk.nbytes
    elements = torch.from_numpy(part.elements())
    cast = chunk.to(flat.device, flat.dtype)
    flat[elements.to(flat.device)] = cast
    return chunk.nbytes + elements.nbytes + (cast.nbytes if cast is not chunk else 0)

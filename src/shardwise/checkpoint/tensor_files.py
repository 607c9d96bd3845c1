"""The safetensors files of one kind (`model*`, `optimizer*`): planned, written and read by byte range."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.manifest import FileRecord, Region, RegionSums, check_size
from shardwise.checkpoint.peers import Peers
from shardwise.checkpoint.piece import DTYPES, Piece
from shardwise.checkpoint.tensor_file import LENGTH_BYTES, TensorFile, header_bytes, lay_out, parse, split
from shardwise.errors import CheckpointError
from shardwise.layout.ranges import Range

METADATA = {"format": "pt"}
_CHUNK_BYTES = 32 * 2**20
"""Staged at once where a piece cannot be written, or read into, as it lies in memory."""


@dataclass(frozen=True)
class TensorFiles:
    """Files by name, each with its layout, in order."""

    stem: str
    files: dict[str, TensorFile]

    def place(self, name: str) -> tuple[str, TensorFile] | None:
        """The file that holds a tensor."""
        return next(((file, layout) for file, layout in self.files.items() if name in layout.tensors), None)

    @property
    def index(self) -> dict[str, Any] | None:
        """What `<stem>.safetensors.index.json` says where there are several files."""
        if len(self.files) == 1:
            return None
        stored = [tensor for layout in self.files.values() for tensor in layout.tensors.values()]
        return {
            "metadata": {
                "total_parameters": sum(tensor.numel for tensor in stored),
                "total_size": sum(tensor.nbytes for tensor in stored),
            },
            "weight_map": {name: file for file, layout in self.files.items() for name in layout.tensors},
        }


def plan(stem: str, pieces: Sequence[Piece], max_file_bytes: int) -> TensorFiles:
    """Lay tensors out in files of at most `max_file_bytes`. The same on every rank."""
    parts = split([piece.stored for piece in pieces], max_file_bytes)
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
    if files.index is not None:
        text = json.dumps(files.index, indent=2, sort_keys=True) + "\n"
        (directory / f"{files.stem}.safetensors.index.json").write_text(text, encoding="utf-8")


def _allocate(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            raise
        os.ftruncate(fd, nbytes)


def write(directory: Path, files: TensorFiles, pieces: Iterable[Piece], peers: Peers) -> dict[str, list[Region]]:
    """Write what is this rank's to write, in its final place, and have it on disk. Local.

    Returns, by file, the checksums of what was written.
    """
    by_name = {piece.name: piece for piece in pieces}
    written: dict[str, list[Region]] = {}
    for name, layout in files.files.items():
        own = [(by_name[tensor], by_name[tensor].to_write(peers)) for tensor in layout.tensors]
        own = [(piece, elements) for piece, elements in own if elements.length]
        if not own and not peers.is_first:
            continue
        sums = RegionSums()
        fd = os.open(directory / name, os.O_WRONLY)
        try:
            if peers.is_first:
                _write_at(fd, 0, layout.header, sums)
            for piece, elements in own:
                start = layout.byte_range(piece.name, *elements).start
                for data in _chunks(piece, elements):
                    start = _write_at(fd, start, data, sums)
            os.fsync(fd)
        finally:
            os.close(fd)
        written[name] = sums.regions()
    return written


def _chunks(piece: Piece, elements: Range) -> Iterator[memoryview]:
    """The bytes of some of a piece's elements, without a copy where they lie in this process's memory in order."""
    flat = piece.tensor.reshape(-1)
    step = max(1, _CHUNK_BYTES // piece.tensor.itemsize)
    for start in range(elements.start - piece.start, elements.stop - piece.start, step):
        chunk = flat[start : min(start + step, elements.stop - piece.start)]
        yield _bytes(chunk.cpu().contiguous())


def _bytes(flat: Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _write_at(fd: int, start: int, data: bytes | memoryview, sums: RegionSums) -> int:
    """Returns where the data ends."""
    sums.add(start, data)
    view = memoryview(data)
    while view.nbytes:
        count = os.pwrite(fd, view, start)
        view, start = view[count:], start + count
    return start


# Reading --------------------------------------------------------------------------------------------------------------


def find(directory: Path, stem: str, manifest: dict[str, FileRecord]) -> TensorFiles:
    """The files of one kind that a manifest names, by their own headers.

    Raises CheckpointError, naming the file, if one is missing, truncated or has a header that cannot be right.
    """
    names = [n for n in sorted(manifest) if n.endswith(".safetensors") and n.split(".")[0].split("-")[0] == stem]
    files: dict[str, TensorFile] = {}
    for name in names:
        check_size(directory / name, manifest[name])
        files[name] = _read_header(directory / name)
    return TensorFiles(stem, files)


def _read_header(path: Path) -> TensorFile:
    try:
        with path.open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            prefix = file.read(LENGTH_BYTES)
            header = prefix + file.read(header_bytes(prefix, nbytes) - LENGTH_BYTES)
        return parse(header, nbytes)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def read(directory: Path, files: TensorFiles, wanted: Iterable[tuple[str, Piece]]) -> None:
    """Fill pieces with the tensors stored under the names given, cast to the pieces' dtypes. Local.

    Each rank reads the bytes of its own elements and no others.
    """
    by_file: dict[str, list[tuple[str, Piece]]] = {}
    for name, piece in wanted:
        place = files.place(name)
        assert place is not None
        torch.autograd.graph.increment_version(piece.tensor)  # also of empty ones: ranks must see the same change
        if piece.tensor.numel():
            by_file.setdefault(place[0], []).append((name, piece))
    for file, pieces in by_file.items():
        layout = files.files[file]
        fd = os.open(directory / file, os.O_RDONLY)
        try:
            for name, piece in sorted(pieces, key=lambda item: layout.starts[item[0]]):
                _fill(fd, layout, name, piece)
        except EOFError as error:
            raise CheckpointError(
                f"{directory / file} ends at byte {error}, before tensor data that it holds"
            ) from None
        finally:
            os.close(fd)


def _fill(fd: int, layout: TensorFile, name: str, piece: Piece) -> None:
    dtype, target = DTYPES[layout.tensors[name].dtype], piece.tensor
    flat = target.view(-1) if target.is_contiguous() else torch.empty(target.numel(), dtype=dtype)
    in_place = flat.dtype == dtype and flat.device.type == "cpu"
    step = flat.numel() if in_place else max(1, _CHUNK_BYTES // dtype.itemsize)
    for start in range(0, flat.numel(), step):
        stop = min(start + step, flat.numel())
        chunk = flat[start:stop] if in_place else torch.empty(stop - start, dtype=dtype)
        first = layout.byte_range(name, piece.start + start, piece.start + stop).start
        _read_at(fd, first, _bytes(chunk))
        if not in_place:
            flat[start:stop].copy_(chunk)
    if not target.is_contiguous():
        target.copy_(flat.view(target.shape))


def _read_at(fd: int, start: int, into: memoryview) -> None:
    while into.nbytes:
        count = os.preadv(fd, [into], start)
        if not count:
            raise EOFError(start)
        into, start = into[count:], start + count

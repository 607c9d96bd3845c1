"""Writes safetensors: a checkpoint of shardwise, or a directory that `from_pretrained` reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from shardwise.checkpoint.format import manifest, names_json, tensor_files, training_json
from shardwise.checkpoint.format.local_tensor import bytes_of
from shardwise.checkpoint.format.manifest import FileRecord, Manifest
from shardwise.checkpoint.format.tensor_files import TensorFiles
from shardwise.checkpoint.interchange.carried import Carried, Tensors
from shardwise.checkpoint.io.checksums import RegionSums
from shardwise.checkpoint.io.local_file import write_at
from shardwise.checkpoint.io.storage import LocalDirectory
from shardwise.checkpoint.publish import commit

_CHUNK_BYTES = 8 * 2**20


def write_checkpoint(carried: Carried, target: Path, max_file_bytes: int) -> None:
    """Write a committed checkpoint: `target.partial` until everything is on disk. Raises CheckpointError."""
    partial = commit.begin(target)
    try:
        _write_files(partial, "model", carried.model, max_file_bytes)
        if carried.optimizer is not None:
            _write_files(partial, "optimizer", carried.state, max_file_bytes)
        document = training_json.describe(carried.step, carried.optimizer, [], carried.extra)
        in_memory = {names_json.NAME: names_json.encode(carried.names)} if carried.names else {}
        _write_small(partial, {**carried.files, **in_memory, training_json.NAME: training_json.encode(document)})
        records = {path.name: _record_of(path) for path in sorted(partial.iterdir())}
        manifest.write(LocalDirectory(partial), Manifest(records))
        commit.commit(target)
    except BaseException:
        commit.discard(target)
        raise


def write_hugging_face(carried: Carried, target: Path, max_file_bytes: int) -> None:
    """Write the model alone, with its configuration: all there or not there. Raises CheckpointError."""
    partial = commit.begin(target)
    try:
        _write_files(partial, "model", carried.model, max_file_bytes)
        _write_small(partial, carried.files)
        commit.commit(target)
    except BaseException:
        commit.discard(target)
        raise


def _write_small(directory: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        LocalDirectory(directory).write(name, data)


def _write_files(directory: Path, stem: str, tensors: Tensors, max_file_bytes: int) -> None:
    planned = tensor_files.lay_out_files(stem, tuple(tensors.stored.values()), max_file_bytes)
    tensor_files.create(directory, planned)
    _write_small(directory, planned.index)
    for file in planned.files:
        _fill(directory / file, planned, file, tensors)


def _fill(path: Path, planned: TensorFiles, file: str, tensors: Tensors) -> None:
    layout = planned.files[file]
    fd = os.open(path, os.O_WRONLY)
    try:
        write_at(fd, 0, layout.header)
        for name in layout.tensors:
            for start, values in tensors.runs(name):
                first = layout.byte_range(name, start, start + values.numel()).start
                write_at(fd, first, bytes_of(values))
        os.fsync(fd)
    finally:
        os.close(fd)


def _record_of(path: Path) -> FileRecord:
    """Sums of what is in the file: sources come in any order, and regions are few only in the file's own."""
    sums, start = RegionSums(), 0
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            sums.add(start, data)
            start += len(data)
    return FileRecord(start, tuple(sums.regions()))

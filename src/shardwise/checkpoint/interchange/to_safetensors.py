"""Writes safetensors: a checkpoint of shardwise, or a directory that `from_pretrained` reads."""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.checkpoint.format import manifest, names_json, tensor_files, training_json
from shardwise.checkpoint.format.local_tensor import bytes_of
from shardwise.checkpoint.format.manifest import FileRecord, Manifest
from shardwise.checkpoint.interchange.carried import Carried, Tensors
from shardwise.checkpoint.io.checksums import RegionSums
from shardwise.checkpoint.io.local_file import write_at
from shardwise.checkpoint.io.storage import LocalDirectory
from shardwise.checkpoint.publish import commit
from shardwise.checkpoint.publish.target import write_documents

_CHUNK_BYTES = 8 * 2**20


def write_checkpoint(carried: Carried, target: Path, max_file_bytes: int) -> None:
    """Write a committed checkpoint: `target.partial` until everything is on disk. Raises CheckpointError."""
    with commit.building(target) as partial:
        _write_files(partial, "model", carried.model, max_file_bytes)
        if carried.optimizer is not None:
            _write_files(partial, "optimizer", carried.state, max_file_bytes)
        document = training_json.describe(carried.step, carried.optimizer, [], carried.extra)
        in_memory = {names_json.NAME: names_json.encode(carried.names)} if carried.names else {}
        documents = {**carried.files, **in_memory, training_json.NAME: training_json.encode(document)}
        write_documents(LocalDirectory(partial), documents)
        records = {path.name: _record_of(path) for path in sorted(partial.iterdir())}
        manifest.write(LocalDirectory(partial), Manifest(records))


def write_hugging_face(carried: Carried, target: Path, max_file_bytes: int) -> None:
    """Write the model alone, with its configuration: all there or not there. Raises CheckpointError."""
    with commit.building(target) as partial:
        _write_files(partial, "model", carried.model, max_file_bytes)
        write_documents(LocalDirectory(partial), carried.files)


def _write_files(directory: Path, stem: str, tensors: Tensors, max_file_bytes: int) -> None:
    planned = tensor_files.lay_out_files(stem, tuple(tensors.stored.values()), max_file_bytes)
    tensor_files.create(directory, planned)
    write_documents(LocalDirectory(directory), planned.index)
    for file, layout in planned.files.items():
        with (directory / file).open("r+b", buffering=0) as out:
            write_at(out.fileno(), 0, layout.header)
            for name in layout.tensors:
                for start, values in tensors.runs(name):
                    first = layout.byte_range(name, start, start + values.numel()).start
                    write_at(out.fileno(), first, bytes_of(values))
            os.fsync(out.fileno())


def _record_of(path: Path) -> FileRecord:
    """Sums of what is in the file: sources come in any order, and regions are few only in the file's own."""
    sums, start = RegionSums(), 0
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            sums.add(start, data)
            start += len(data)
    return FileRecord(start, tuple(sums.regions()))

"""safetensors files: shardwise's own checkpoints of either layout, and Hugging Face directories."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shardwise.checkpoint.format import manifest, names_json, per_rank_buffers, tensor_files, training_json
from shardwise.checkpoint.format.contents import Contents
from shardwise.checkpoint.format.hugging_face import weights_of
from shardwise.checkpoint.format.local_tensor import DTYPES, bytes_of
from shardwise.checkpoint.format.manifest import FileRecord, Manifest
from shardwise.checkpoint.format.safetensors_layout import TensorFile
from shardwise.checkpoint.interchange.checkpoint_contents import CheckpointContents, LazyTensor, LazyTensors
from shardwise.checkpoint.io.checksums import RegionSums
from shardwise.checkpoint.io.storage import Directory, LocalDirectory, Location, Source
from shardwise.checkpoint.publish import commit
from shardwise.checkpoint.publish.target import write_documents
from shardwise.files.local_file import write_at

# Writing --------------------------------------------------------------------------------------------------------------


_CHUNK_BYTES = 8 * 2**20


def write_checkpoint(contents: CheckpointContents, target: Path, max_file_bytes: int) -> None:
    """Write a committed checkpoint: `target.partial` until everything is on disk. Raises CheckpointError."""
    with commit.building(target) as partial:
        stems = {tensor_files.MODEL: contents.model}
        if contents.optimizer is not None:
            stems[tensor_files.OPTIMIZER] = contents.state
        records = _write_files(partial, stems, max_file_bytes)
        document = training_json.describe(contents.step, contents.optimizer, [], contents.extra)
        in_memory = {names_json.NAME: names_json.encode(contents.names)} if contents.names else {}
        documents = {**contents.files, **in_memory, training_json.NAME: training_json.encode(document)}
        records |= write_documents(LocalDirectory(partial), documents)
        manifest.write(LocalDirectory(partial), Manifest(records))


def write_hugging_face(contents: CheckpointContents, target: Path, max_file_bytes: int) -> None:
    """Write the model alone, with its configuration: complete or absent. Raises CheckpointError."""
    with commit.building(target) as partial:
        _write_files(partial, {tensor_files.MODEL: contents.model}, max_file_bytes)
        write_documents(LocalDirectory(partial), contents.files)


def _write_files(directory: Path, stems: Mapping[str, LazyTensors], max_file_bytes: int) -> dict[str, FileRecord]:
    """Write the files of every stem, a tensor at a time, and their indexes. Returns their records."""
    found = {
        stem: tensor_files.lay_out_files(
            stem, tuple(tensor.stored(name) for name, tensor in tensors.items()), max_file_bytes
        )
        for stem, tensors in stems.items()
    }
    records = write_documents(LocalDirectory(directory), tensor_files.indexes([*found.values()]))
    for stem, files in found.items():
        tensor_files.create(directory, files)
        for file, layout in files.files.items():
            sums = RegionSums()
            with (directory / file).open("r+b", buffering=0) as out:
                _write(out.fileno(), 0, memoryview(layout.header), sums)
                for name in layout.tensors:
                    _write(out.fileno(), layout.starts[name], bytes_of(stems[stem][name].load().reshape(-1)), sums)
                os.fsync(out.fileno())
            records[file] = FileRecord(layout.nbytes, tuple(sums.regions()))
    return records


def _write(fd: int, start: int, data: memoryview, sums: RegionSums) -> None:
    for at in range(0, data.nbytes, _CHUNK_BYTES):
        chunk = data[at : at + _CHUNK_BYTES]
        sums.add(start + at, chunk)
        write_at(fd, start + at, chunk)


# Reading --------------------------------------------------------------------------------------------------------------


_TENSORS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".msgpack", ".h5")
_OWN = (manifest.NAME, training_json.NAME, names_json.NAME)


class _Files(Protocol):
    def open(self, name: str) -> AbstractContextManager[Source]: ...


def lazy_tensors(place: _Files, files: Mapping[str, TensorFile]) -> dict[str, LazyTensor]:
    """Return the tensors of several safetensors files in one directory or checkpoint."""
    return {
        name: LazyTensor(DTYPES[stored.dtype], stored.shape, partial(_load, place, file, layout, name))
        for file, layout in files.items()
        for name, stored in layout.tensors.items()
    }


def _load(place: _Files, file: str, layout: TensorFile, name: str) -> Tensor:
    stored = layout.tensors[name]
    values = torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="cpu")
    with manifest.reading_data(f"{place}/{file}"), place.open(file) as source:
        source.read_at(layout.starts[name], bytes_of(values.view(-1)))
    return values


def read_checkpoint(path: Location) -> CheckpointContents:
    """Return the contents of a committed checkpoint of `sw.checkpoint.save`. Raises CheckpointError."""
    contents = Contents.of(path)
    training = training_json.read(contents)
    model = lazy_tensors(contents, tensor_files.find_model(contents).files)
    return CheckpointContents(
        model,
        lazy_tensors(contents, tensor_files.find(contents, "optimizer").files),
        training["optimizer"],
        training["step"],
        training["extra"],
        files=_configuration(contents.directory, contents.manifest.files),
        left_out=tuple(
            f"{name} of ranks other than 0" for name in tensor_files.find(contents, per_rank_buffers.STEM).tensors
        ),
        names=names_json.read(contents, {name: tensor.shape for name, tensor in model.items()}),
    )


def read_hugging_face(path: Path) -> CheckpointContents:
    """Return the weights in a directory of `save_pretrained`. Raises CheckpointError."""
    directory = LocalDirectory(path)
    return CheckpointContents(lazy_tensors(directory, weights_of(directory).files), files=configuration_of(path))


def configuration_of(path: Path) -> dict[str, bytes]:
    """Return the files of a directory that belong to a model's configuration or tokenizer, by name."""
    directory = LocalDirectory(path)
    return _configuration(directory, (name for name in directory.names() if directory.has(name)))


def _configuration(directory: Directory, found: Iterable[str]) -> dict[str, bytes]:
    """Return the files that hold no weights and no training state."""
    kept = (name for name in found if name not in _OWN and not name.endswith(_TENSORS) and name[0] != ".")
    return {name: directory.read(name) for name in kept}

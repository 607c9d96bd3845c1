"""safetensors files: shardwise's own checkpoints of either layout, and Hugging Face directories."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
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
from shardwise.checkpoint.interchange.carried import Carried, Run, Tensors, parts
from shardwise.checkpoint.io.checksums import RegionSums
from shardwise.checkpoint.io.storage import Directory, LocalDirectory, Location, Source
from shardwise.checkpoint.publish import commit
from shardwise.checkpoint.publish.target import write_documents
from shardwise.errors import CheckpointError
from shardwise.files.local_file import write_at

# Writing --------------------------------------------------------------------------------------------------------------


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
    """Write the model alone, with its configuration: complete or absent. Raises CheckpointError."""
    with commit.building(target) as partial:
        _write_files(partial, "model", carried.model, max_file_bytes)
        write_documents(LocalDirectory(partial), carried.files)


def _write_files(directory: Path, stem: str, tensors: Tensors, max_file_bytes: int) -> None:
    files = tensor_files.lay_out_files(stem, tuple(tensors.stored.values()), max_file_bytes)
    tensor_files.create(directory, files)
    write_documents(LocalDirectory(directory), files.index)
    for file, layout in files.files.items():
        with (directory / file).open("r+b", buffering=0) as out:
            write_at(out.fileno(), 0, layout.header)
            for name in layout.tensors:
                for start, values in tensors.runs(name):
                    first = layout.byte_range(name, start, start + values.numel()).start
                    write_at(out.fileno(), first, bytes_of(values))
            os.fsync(out.fileno())


def _record_of(path: Path) -> FileRecord:
    """Read a file back for its size and checksums: sources come in any order; in the file's order, regions are few."""
    sums, start = RegionSums(), 0
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            sums.add(start, data)
            start += len(data)
    return FileRecord(start, tuple(sums.regions()))


# Reading --------------------------------------------------------------------------------------------------------------


_TENSORS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".msgpack", ".h5")
_OWN = (manifest.NAME, training_json.NAME, names_json.NAME)


class _Files(Protocol):
    def open(self, name: str) -> AbstractContextManager[Source]: ...


class SafetensorsTensors:
    """The tensors of several safetensors files in one directory or checkpoint."""

    def __init__(self, place: _Files, files: Mapping[str, TensorFile]) -> None:
        self._place = place
        self._files = {name: (file, layout) for file, layout in files.items() for name in layout.tensors}
        self.stored = {name: layout.tensors[name] for name, (_, layout) in self._files.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See `Tensors`."""
        file, layout = self._files[name]
        values = torch.empty(stop - start, dtype=DTYPES[self.stored[name].dtype], device="cpu")
        path = f"{self._place}/{file}"
        if values.numel():
            try:
                with manifest.reading(path), self._place.open(file) as source:
                    source.read_at(layout.byte_range(name, start, stop).start, bytes_of(values))
            except EOFError as error:
                raise CheckpointError(f"{path} ends at byte {error}, before the end of its tensor data") from None
            except (FileNotFoundError, NotADirectoryError):
                raise CheckpointError(f"{path} is missing") from None
        return values

    def runs(self, name: str) -> Iterator[Run]:
        """See `Tensors`."""
        return parts(self, name)


def read_checkpoint(path: Location) -> Carried:
    """Return the contents of a committed checkpoint of `sw.checkpoint.save`. Raises CheckpointError."""
    contents = Contents.of(path)
    training = training_json.read(contents)
    return Carried(
        SafetensorsTensors(contents, tensor_files.find_model(contents).files),
        SafetensorsTensors(contents, tensor_files.find(contents, "optimizer").files),
        training["optimizer"],
        training["step"],
        training["extra"],
        files=_configuration(contents.directory, contents.manifest.files),
        left_out=tuple(
            f"{name} of ranks other than 0" for name in tensor_files.find(contents, per_rank_buffers.STEM).tensors
        ),
        names=names_json.read(contents),
    )


def read_hugging_face(path: Path) -> Carried:
    """Return the weights in a directory of `save_pretrained`. Raises CheckpointError."""
    directory = LocalDirectory(path)
    tensors = SafetensorsTensors(directory, weights_of(directory).files)
    return Carried(tensors, SafetensorsTensors(directory, {}), files=configuration_of(path))


def configuration_of(path: Path) -> dict[str, bytes]:
    """Return the files of a directory that belong to a model's configuration or tokenizer, by name."""
    directory = LocalDirectory(path)
    return _configuration(directory, (name for name in directory.names() if directory.has(name)))


def _configuration(directory: Directory, found: Iterable[str]) -> dict[str, bytes]:
    """Return the files that hold no weights and no training state."""
    kept = (name for name in found if name not in _OWN and not name.endswith(_TENSORS) and name[0] != ".")
    return {name: directory.read(name) for name in kept}

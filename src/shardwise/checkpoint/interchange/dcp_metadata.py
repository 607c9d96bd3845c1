"""The `.metadata` of a torch DCP directory: where each chunk of each tensor is stored. A pickle, read with an
allow-list.

The names that DCP writes there stand for inert records made for this one reading, or for plain builtins: no class of
torch is touched, nothing is imported, nothing of the pickle's choosing is executed. Any other name is refused.
(`torch.load(weights_only=True)` does not read the pickle protocol that DCP writes.)
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.format.safetensors_layout import TORCH_NAMES
from shardwise.checkpoint.interchange.nested import Key
from shardwise.errors import CheckpointError
from shardwise.sharded.extensions.dcp_chunks import Box, runs_of

NAME = ".metadata"
_RECORDS = {"torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"}
"""Modules whose classes stand for records."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a file: one torch.save stream."""

    file: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor that is cut into boxes."""

    dtype: str
    """torch's name of the dtype."""
    shape: tuple[int, ...]
    chunks: tuple[tuple[Box, FileRange], ...]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """Everything in a directory, by `Key`."""

    tensors: Mapping[Key, DcpTensor]
    objects: Mapping[Key, FileRange]

    def places(self) -> Iterator[FileRange]:
        """Yield the file ranges of all objects and tensors."""
        yield from self.objects.values()
        for tensor in self.tensors.values():
            yield from (place for _, place in tensor.chunks)


def read(directory: Path) -> DcpMetadata:
    """Read `.metadata`.

    Raises CheckpointError for a global that does not belong there, naming it, and for damage; UnreadableError if the
    file exists and cannot be read; FileNotFoundError if it does not exist.
    """
    path = directory / NAME
    with manifest.reading(path):
        data = path.read_bytes()
    try:
        document = _Unpickler(path, data).load()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    try:
        return _checked(document)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not say where its tensors are: {type(error).__name__}: {error}") from None


class _Record:
    """Stands for an object of DCP's: has its attributes, or the arguments that it was made with."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.arguments = tuple(state)


class _Unpickler(pickle._Unpickler):
    """pickle's own in Python. The one in C allocates what a file says: 64 GiB for a large index in its memo."""

    dispatch: ClassVar = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }

    def __init__(self, path: Path, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path
        self._records: dict[tuple[str, str], type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module in _RECORDS and "." not in name:  # a new class for each reading: no pickle can change one of others
            return self._records.setdefault((module, name), type(name, (_Record,), {}))
        if (module, name) in _STAND_INS:
            return _STAND_INS[module, name]
        if module == "torch" and name in TORCH_NAMES.values():
            return name
        raise CheckpointError(
            f"{self._path} names {module}.{name}, which does not belong in the metadata of a DCP checkpoint: it "
            "was not read, and nothing in it was executed"
        )


def _joined(*parts: str) -> str:
    return os.path.join(*map(str, parts)) if parts else ""  # noqa: PTH118 - a name, not a path to follow


_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): tuple,
    ("builtins", "tuple"): tuple,
    ("builtins", "list"): list,
    ("collections", "OrderedDict"): dict,
    ("torch.serialization", "_get_layout"): str,
    **{(module, name): _joined for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")},
}
"""Functions and classes that are called in place of the named globals."""


def _checked(document: Any) -> DcpMetadata:
    places: dict[tuple[str, tuple[int, ...] | None], FileRange] = {}
    for index, info in document.storage_data.items():
        offset = getattr(index, "offset", None)
        places[_text(index.fqn), None if offset is None else _numbers(offset)] = _place(info)
    ways: Mapping[str, Any] = document.planner_data or {}
    tensors: dict[Key, DcpTensor] = {}
    objects: dict[Key, FileRange] = {}
    for name, entry in document.state_dict_metadata.items():
        key = tuple(ways[name]) if name in ways else (name,)
        if not key or not all(isinstance(part, (str, int)) for part in key):
            raise ValueError(f"{name!r} is in none of its files")
        if hasattr(entry, "chunks"):
            tensors[key] = _tensor(_text(name), entry, places.__getitem__)
        else:
            objects[key] = places[_text(name), None]
    return DcpMetadata(tensors, objects)


def _tensor(name: str, entry: Any, place: Callable[[tuple[str, tuple[int, ...]]], FileRange]) -> DcpTensor:
    shape = _numbers(entry.size)
    properties = entry.properties
    dtype = properties.arguments[0] if properties.arguments else properties.dtype
    if dtype not in TORCH_NAMES.values():
        raise ValueError(f"{name!r} has no dtype")
    chunks = []
    for chunk in entry.chunks:
        box = Box(_numbers(chunk.offsets), _numbers(chunk.sizes))
        next(runs_of(shape, box), None)  # raises if it is not inside
        chunks.append((box, place((name, box.offsets))))
    numel = Box(shape, shape).numel
    if sum(box.numel for box, _ in chunks) != numel:
        raise ValueError(f"the chunks of {name!r} do not hold the {numel} elements of {shape}")
    return DcpTensor(dtype, shape, tuple(chunks))


def _place(info: Any) -> FileRange:
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"its data is transformed by {info.transform_descriptors}, which cannot be undone here")
    file = _text(info.relative_path)
    if file != os.path.basename(file) or file in {"", ".", ".."} or "\0" in file:  # noqa: PTH119
        raise ValueError(f"{file!r} is not the name of a file in the checkpoint")
    start, nbytes = _numbers((info.offset, info.length))
    return FileRange(file, start, nbytes)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a name")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{numbers!r} are not sizes")
    return numbers

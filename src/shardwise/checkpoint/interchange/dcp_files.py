"""torch DCP directories, as FSDP2, torchtitan and `torch.distributed.checkpoint.save` write them.

They are written with torch's own planner and metadata, one tensor in memory at a time.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils._pytree import tree_map_only

from shardwise.checkpoint.format.local_tensor import bytes_of
from shardwise.checkpoint.interchange import dcp_metadata
from shardwise.checkpoint.interchange.checkpoint_contents import CheckpointContents, LazyTensor
from shardwise.checkpoint.interchange.dcp_metadata import DcpTensor
from shardwise.checkpoint.interchange.nested import Key, dotted, nested_state
from shardwise.checkpoint.interchange.torch_files import read_stream
from shardwise.checkpoint.publish import commit
from shardwise.errors import CheckpointError, UnreadableError
from shardwise.sharded.extensions.dcp_chunks import Box

# Reading --------------------------------------------------------------------------------------------------------------


def read_dcp(directory: Path) -> tuple[dict[Key, Any], dict[Key, str]]:
    """Return everything in the directory by `Key`, and why what is not plain was not read; tensors stay in their files.

    Raises CheckpointError, also if a file is missing or shorter than the metadata promises.
    """
    metadata = dcp_metadata.read(directory)
    ends: dict[str, int] = {}
    for place in metadata.places():
        ends[place.file] = max(place.start + place.nbytes, ends.get(place.file, 0))
    for file, end in ends.items():
        if not (directory / file).is_file():
            raise CheckpointError(f"{directory / file} is missing; {dcp_metadata.NAME} lists it")
        if (size := (directory / file).stat().st_size) < end:
            raise CheckpointError(
                f"{directory / file} is truncated: it has {size} bytes, but {dcp_metadata.NAME} lists data up to byte "
                f"{end}"
            )
    values: dict[Key, Any] = {key: _lazy(directory, dotted(key), tensor) for key, tensor in metadata.tensors.items()}
    refused: dict[Key, str] = {}
    for key, place in metadata.objects.items():
        try:
            values[key] = read_stream(directory / place.file, place.start, place.nbytes)
        except UnreadableError:
            raise
        except CheckpointError as error:
            refused[key] = str(error)
    return values, refused


def _lazy(directory: Path, name: str, tensor: DcpTensor) -> LazyTensor:
    dtype: torch.dtype = getattr(torch, tensor.dtype)

    def load() -> Tensor:
        found = None if len(tensor.chunks) == 1 else torch.empty(tensor.shape, dtype=dtype, device="cpu")
        for box, place in tensor.chunks:
            chunk = read_stream(directory / place.file, place.start, place.nbytes)
            if not isinstance(chunk, LazyTensor) or (chunk.shape, chunk.dtype) != (box.sizes, dtype):
                raise CheckpointError(
                    f"{directory / place.file} does not have, at byte {place.start}, the part of {name!r} of "
                    f"shape {box.sizes} and {tensor.dtype} that {dcp_metadata.NAME} lists there"
                )
            if found is None:
                return chunk.load()
            inside = tuple(slice(first, first + size) for first, size in zip(box.offsets, box.sizes, strict=True))
            found[inside] = chunk.load()
        assert found is not None
        return found

    return LazyTensor(dtype, tensor.shape, load)


# Writing --------------------------------------------------------------------------------------------------------------


_FILE = f"__0_0{DEFAULT_SUFFIX}"
_CHUNK_BYTES = 32 * 2**20
"""Bytes of a chunk, to whole rows: a rank that loads a part of a tensor reads the chunks that it lies in."""


def write_dcp(contents: CheckpointContents, target: Path, flat: bool) -> None:
    """Write a directory that `torch.distributed.checkpoint.load` reads: complete or absent. Raises CheckpointError.

    Args:
        flat: put the model's tensors at the top level, as torchtitan has them, instead of below `model`.

    The optimizer is stored in both of torch's forms: groups as a list, and options by fqn.
    """
    state = nested_state(contents)
    if "optimizer" in state:
        state["optimizer"].update(
            {
                f"param_groups.{fqn}.{option}": value
                for group in state["optimizer"]["param_groups"]
                for fqn in group["params"]
                for option, value in group.items()
                if option != "params"
            }
        )
    if flat:
        model = state.pop("model")
        taken = sorted(model.keys() & state.keys())
        if taken:
            raise CheckpointError(
                f"the model has a tensor named {taken[0]!r}, which is reserved at the top level: convert without --flat"
            )
        state = {**model, **state}
    with commit.building(target) as partial, _quietly(), _first_cause():
        state = tree_map_only(LazyTensor, _InChunks, state)
        save(state, storage_writer=_Writer(partial), planner=_Planner(), no_dist=True)


class _InChunks:
    """Stands in the state_dict for a lazy tensor; it is cut into chunks of whole rows."""

    def __init__(self, tensor: LazyTensor) -> None:
        self.tensor = tensor

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:  # noqa: A002 - torch's name
        properties, size = TensorProperties(dtype=self.tensor.dtype), torch.Size(self.tensor.shape)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)),
                    properties=properties,
                    size=size,
                ),
            )
            for chunk in self._chunks()
        ]

    def _chunks(self) -> Iterator[Box]:
        shape, rest = self.tensor.shape, (0,) * (len(self.tensor.shape) - 1)
        if not self.tensor.nbytes or not shape:
            yield Box((0,) * len(shape), shape)
            return
        rows = max(1, _CHUNK_BYTES * shape[0] // self.tensor.nbytes)
        for first in range(0, shape[0], rows):
            yield Box((first, *rest), (min(rows, shape[0] - first), *shape[1:]))


class _Planner(DefaultSavePlanner):
    _loaded: tuple[LazyTensor, Tensor] | None = None
    """The tensor whose chunks are being written."""

    def part_of(self, item: WriteItem) -> tuple[Any, ...]:
        """Return a key that is equal for the same part of tied tensors, which is written once."""
        found: Any = self.state_dict[item.index.fqn]
        return id(found.tensor if isinstance(found, _InChunks) else found), item.index.offset, item.type

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        found: Any = self.state_dict[write_item.index.fqn]
        if not isinstance(found, _InChunks):
            return super().resolve_data(write_item)
        if self._loaded is None or self._loaded[0] is not found.tensor:
            self._loaded = None  # frees it first
            self._loaded = found.tensor, found.tensor.load()
        values, data = self._loaded[1], write_item.tensor_data
        assert data is not None
        if data.chunk.sizes == values.shape:
            return values
        rows = values.narrow(0, data.chunk.offsets[0], data.chunk.sizes[0])
        # In a storage of its own, without a copy: torch.save writes the whole storage of a view.
        return torch.frombuffer(bytes_of(rows.reshape(-1)), dtype=rows.dtype).view(rows.shape)


class _Writer(FileSystemWriter):
    """torch's writer, which writes what is tied once and keeps no data until the file is full."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert isinstance(planner, _Planner)
        results = []
        places: dict[tuple[Any, ...], _StorageInfo] = {}
        with (Path(self.path) / _FILE).open("wb") as file:
            for item in plan.items:
                part = planner.part_of(item)
                if part not in places:
                    places[part] = self._append(file, planner, item)
                results.append(WriteResult(item.index, places[part].length, places[part]))
            file.flush()
            os.fsync(file.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    @staticmethod
    def _append(file: IO[bytes], planner: SavePlanner, item: WriteItem) -> _StorageInfo:
        start, data = file.tell(), planner.resolve_data(item)
        if isinstance(data, Tensor):
            torch.save(data, file)
        else:
            file.write(data.getbuffer())
        return _StorageInfo(_FILE, start, file.tell() - start)


@contextmanager
def _first_cause() -> Iterator[None]:
    """Raise the original error instead of torch's wrapper, which lists errors by rank."""
    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from None


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence torch's warning and log message that one process saves alone: that is intended here."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    finally:
        logger.setLevel(before)

"""torch DCP directories, as FSDP2, torchtitan and `torch.distributed.checkpoint.save` write them.

They are written with torch's own writer, one part of one tensor in memory at a time.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

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

from shardwise.checkpoint.format.local_tensor import DTYPES
from shardwise.checkpoint.format.safetensors_layout import StoredTensor
from shardwise.checkpoint.interchange import dcp_metadata
from shardwise.checkpoint.interchange.carried import PART_BYTES, Carried, Run, Tensors
from shardwise.checkpoint.interchange.dcp_metadata import DcpTensor, Key, dotted
from shardwise.checkpoint.interchange.nested import Tree, nested_state
from shardwise.checkpoint.interchange.torch_file import SavedTensor, dtype_name, read_stream
from shardwise.checkpoint.publish import commit
from shardwise.errors import CheckpointError, UnreadableError
from shardwise.sharded.dcp_chunks import Box, boxes_of, runs_of

# Writing --------------------------------------------------------------------------------------------------------------


_FILE = f"__0_0{DEFAULT_SUFFIX}"


def write_dcp(carried: Carried, target: Path, flat: bool) -> None:
    """Write a directory that `torch.distributed.checkpoint.load` reads: complete or absent. Raises CheckpointError.

    Args:
        flat: put the model's tensors at the top level, as torchtitan has them, instead of below `model`.

    The optimizer is stored in both of torch's forms: groups as a list, and options by fqn.
    """
    state: dict[str, Any] = nested_state(carried, _OnDisk)
    if "optimizer" in state:
        groups = state["optimizer"]["param_groups"]
        state["optimizer"].update(
            {
                f"param_groups.{fqn}.{option}": value
                for group in groups
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
        save(state, storage_writer=_Writer(partial), planner=_Planner(), no_dist=True)


@dataclass(frozen=True, slots=True)
class _OnDisk:
    """Stands in the state_dict for a tensor that is read part by part while it is written."""

    tensors: Tensors
    stored: StoredTensor

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:  # noqa: A002 - torch's name
        properties = TensorProperties(dtype=DTYPES[self.stored.dtype])
        size = torch.Size(self.stored.shape)
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
                    properties=properties,
                    size=size,
                ),
            )
            for box, _ in self._boxes()
        ]

    def part(self, offsets: tuple[int, ...]) -> Tensor:
        """Return the part that begins at `offsets`."""
        box, start = next((box, start) for box, start in self._boxes() if box.offsets == offsets)
        return self.tensors.read(self.stored.name, start, start + box.numel).view(box.sizes)

    def _boxes(self) -> Iterator[tuple[Box, int]]:
        """Yield consecutive parts of at most PART_BYTES, each with its first element; of an empty tensor one, empty."""
        shape, step = self.stored.shape, max(1, PART_BYTES // self.stored.item_bytes)
        if not self.stored.numel:
            yield Box((0,) * len(shape), shape), 0
        for first in range(0, self.stored.numel, step):
            start = first
            for box in boxes_of(shape, first, min(first + step, self.stored.numel)):
                yield box, start
                start += box.numel


class _Writer(FileSystemWriter):
    """torch's writer keeps a part of every tensor in memory until its file is full; this one keeps none."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert isinstance(planner, _Planner)
        results = []
        places: dict[tuple[Any, ...], _StorageInfo] = {}
        with (Path(self.path) / _FILE).open("wb") as file:
            for item in plan.items:
                part = planner.part_of(item)
                if part not in places:
                    start, data = file.tell(), planner.resolve_data(item)
                    if isinstance(data, Tensor):
                        torch.save(data, file)
                    else:
                        file.write(data.getbuffer())
                    places[part] = _StorageInfo(_FILE, start, file.tell() - start)
                results.append(WriteResult(item.index, places[part].length, places[part]))
            file.flush()
            os.fsync(file.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


class _Planner(DefaultSavePlanner):
    def part_of(self, write_item: WriteItem) -> tuple[Any, ...]:
        """Return a key that is equal for the same part of tied tensors, which is written once."""
        return id(self.state_dict[write_item.index.fqn]), write_item.index.offset, write_item.type

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        found: Any = self.state_dict[write_item.index.fqn]
        if isinstance(found, _OnDisk):
            assert write_item.index.offset is not None
            return found.part(tuple(write_item.index.offset))
        return super().resolve_data(write_item)


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


# Reading --------------------------------------------------------------------------------------------------------------


def read_dcp(directory: Path) -> Tree:
    """Return everything in the directory by `Key`; tensors stay in their files. Raises CheckpointError."""
    metadata = dcp_metadata.read(directory)
    for place in {place.file: place for place in metadata.places()}.values():
        if not (directory / place.file).is_file():
            raise CheckpointError(f"{directory / place.file} is missing; {dcp_metadata.NAME} lists it")
    values: dict[Key, Any] = {}
    refused: dict[Key, str] = {}
    for key, place in metadata.objects.items():
        try:
            values[key] = read_stream(directory / place.file, place.start, place.nbytes)
        except UnreadableError:
            raise
        except CheckpointError as error:
            refused[key] = str(error)
    keys = {key: dotted(key) for key in metadata.tensors}
    return Tree(DcpTensors(directory, metadata.tensors), keys, values, refused)


class DcpTensors:
    """The tensors of a DCP directory, named by their keys, joined with dots."""

    def __init__(self, directory: Path, tensors: Mapping[Key, DcpTensor]) -> None:
        self._directory = directory
        self._tensors = {dotted(key): tensor for key, tensor in tensors.items()}
        self.stored = {
            name: StoredTensor(name, dtype_name(getattr(torch, tensor.dtype), name), tensor.shape)
            for name, tensor in self._tensors.items()
        }
        self._chunk = lru_cache(maxsize=8)(self._open)

    def runs(self, name: str) -> Iterator[Run]:
        """See `Tensors`. Reads chunk by chunk."""
        tensor = self._tensors[name]
        for number, (box, _) in enumerate(tensor.chunks):
            saved, at = self._chunk(name, number), 0
            step = max(1, PART_BYTES // saved.dtype.itemsize)
            for start, stop in runs_of(tensor.shape, box):
                for first in range(start, stop, step):
                    count = min(step, stop - first)
                    yield Run(first, saved.read(at, at + count))
                    at += count

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See `Tensors`. Gathers the elements from the chunks that hold them."""
        tensor = self._tensors[name]
        found = torch.empty(stop - start, dtype=getattr(torch, tensor.dtype), device="cpu")
        for number, (box, _) in enumerate(tensor.chunks):
            at = 0
            for run in runs_of(tensor.shape, box):
                low, high = max(run.start, start), min(run.stop, stop)
                if low < high:
                    first = at + low - run.start
                    found[low - start : high - start] = self._chunk(name, number).read(first, first + high - low)
                at += run.length
        return found

    def _open(self, name: str, number: int) -> SavedTensor:
        tensor = self._tensors[name]
        box, place = tensor.chunks[number]
        saved = read_stream(self._directory / place.file, place.start, place.nbytes)
        if not isinstance(saved, SavedTensor) or (saved.shape, str(saved.dtype)) != (
            box.sizes,
            f"torch.{tensor.dtype}",
        ):
            raise CheckpointError(
                f"{self._directory / place.file} does not have, at byte {place.start}, the part of {name!r} of "
                f"shape {box.sizes} and {tensor.dtype} that {dcp_metadata.NAME} lists there"
            )
        return saved

"""Writes a torch DCP directory, with torch's own writer, one part of one tensor in memory at a time."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from shardwise.checkpoint.interchange.carried import PART_BYTES, Carried, Tensors
from shardwise.checkpoint.interchange.nested import nested_state
from shardwise.checkpoint.publish import commit
from shardwise.errors import CheckpointError
from shardwise.sharded.dcp_chunks import Box, boxes_of

_FILE = f"__0_0{DEFAULT_SUFFIX}"


def write_dcp(carried: Carried, target: Path, flat: bool) -> None:
    """Write a directory that `torch.distributed.checkpoint.load` reads: all there or not there. Raises CheckpointError.

    Args:
        flat: the model's tensors at the top level, as torchtitan has them, instead of below `model`.

    The optimizer is there in both of torch's forms: groups as a list, and options by fqn.
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
                f"the model has a tensor called {taken[0]!r}, which is taken at the top level: convert without --flat"
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
        """The part that begins there."""
        box, start = next((box, start) for box, start in self._boxes() if box.offsets == offsets)
        return self.tensors.read(self.stored.name, start, start + box.numel).view(box.sizes)

    def _boxes(self) -> Iterator[tuple[Box, int]]:
        """Consecutive parts of at most PART_BYTES, each with its first element; an empty tensor is one empty part."""
        shape, step = self.stored.shape, max(1, PART_BYTES // self.stored.item_bytes)
        if not self.stored.numel:
            yield Box((0,) * len(shape), shape), 0
        for first in range(0, self.stored.numel, step):
            start = first
            for box in boxes_of(shape, first, min(first + step, self.stored.numel)):
                yield box, start
                start += box.numel


class _Writer(FileSystemWriter):
    """torch's, which keeps a part of every tensor in memory until its file is full; this keeps none."""

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
        """Equal for what tied names have in common: it is written once."""
        return id(self.state_dict[write_item.index.fqn]), write_item.index.offset, write_item.type

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        found: Any = self.state_dict[write_item.index.fqn]
        if isinstance(found, _OnDisk):
            assert write_item.index.offset is not None
            return found.part(tuple(write_item.index.offset))
        return super().resolve_data(write_item)


@contextmanager
def _first_cause() -> Iterator[None]:
    """Raise what was raised inside, and not what torch puts around it for the ranks that it thinks of."""
    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from None


@contextmanager
def _quietly() -> Iterator[None]:
    """torch warns, and logs, that one process saves alone, which is what is meant."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    finally:
        logger.setLevel(before)

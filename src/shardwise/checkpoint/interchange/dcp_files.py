"""torch DCP directories, as FSDP2, torchtitan and `torch.distributed.checkpoint.save` write them.

They are written with torch's own planner and metadata, one tensor in memory at a time.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils._pytree import tree_map_only

from shardwise.checkpoint.format.local_tensor import bytes_of
from shardwise.checkpoint.interchange import dcp_metadata
from shardwise.checkpoint.interchange.checkpoint_contents import CheckpointContents, LazyTensor
from shardwise.checkpoint.interchange.dcp_metadata import DcpTensor
from shardwise.checkpoint.interchange.nested import Key, dotted, nested_state
from shardwise.checkpoint.interchange.torch_files import read_stream
from shardwise.checkpoint.publish import commit
from shardwise.errors import CheckpointError, UnreadableError
from shardwise.sharded.extensions.dcp_chunks import Box, write_items

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
    # What torch.distributed.checkpoint.save does, but for its writer: that one keeps the last chunk of every tensor in
    # memory until the file is full, and writes a tied tensor once for each name.
    planner = DefaultSavePlanner()
    planner.set_up_planner(tree_map_only(LazyTensor, _InChunks, state), is_coordinator=True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    with commit.building(target) as partial:
        results = _write(partial / _FILE, plan, planner)
        FileSystemWriter(partial).finish(metadata, [results])


class _InChunks:
    """Stands in the state_dict for a lazy tensor; it is cut into chunks of whole rows."""

    def __init__(self, tensor: LazyTensor) -> None:
        self.tensor = tensor

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:  # noqa: A002 - torch's name
        return write_items(fqn, self.tensor.shape, TensorProperties(dtype=self.tensor.dtype), self._chunks())

    def _chunks(self) -> Iterator[Box]:
        shape, rest = self.tensor.shape, (0,) * (len(self.tensor.shape) - 1)
        if not self.tensor.nbytes or not shape:
            yield Box((0,) * len(shape), shape)
            return
        rows = max(1, _CHUNK_BYTES * shape[0] // self.tensor.nbytes)
        for first in range(0, shape[0], rows):
            yield Box((first, *rest), (min(rows, shape[0] - first), *shape[1:]))


def _write(path: Path, plan: SavePlan, planner: DefaultSavePlanner) -> list[WriteResult]:
    """Write the one data file, a tensor at a time. It is on disk when this returns."""
    results: list[WriteResult] = []
    places: dict[int, list[_StorageInfo]] = {}
    with path.open("wb") as file:
        for fqn, group in groupby(plan.items, lambda item: item.index.fqn):
            items, found = list(group), planner.state_dict[fqn]
            value = id(found.tensor if isinstance(found, _InChunks) else found)  # the same of tied tensors
            if value not in places:
                places[value] = [_append(file, data) for data in _data(items, planner)]
            for item, place in zip(items, places[value], strict=True):
                results.append(WriteResult(item.index, place.length, place))
        file.flush()
        os.fsync(file.fileno())
    return results


def _data(items: Sequence[WriteItem], planner: DefaultSavePlanner) -> Iterator[Tensor | io.BytesIO]:
    """Yield what to write for all items of one entry of the state_dict."""
    found = planner.state_dict[items[0].index.fqn]
    values = found.tensor.load() if isinstance(found, _InChunks) else None
    for item in items:
        if values is None or item.tensor_data is None:
            yield planner.resolve_data(item)
        elif len(items) == 1:
            yield values
        else:
            rows = values.narrow(0, item.tensor_data.chunk.offsets[0], item.tensor_data.chunk.sizes[0])
            # In a storage of its own, without a copy: torch.save writes the whole storage of a view.
            yield torch.frombuffer(bytes_of(rows.reshape(-1)), dtype=rows.dtype).view(rows.shape)


def _append(file: IO[bytes], data: Tensor | io.BytesIO) -> _StorageInfo:
    start = file.tell()
    if isinstance(data, Tensor):
        torch.save(data, file)
    else:
        file.write(data.getbuffer())
    return _StorageInfo(_FILE, start, file.tell() - start)

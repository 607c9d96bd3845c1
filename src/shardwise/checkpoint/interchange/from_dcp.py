"""Tensors of a torch DCP directory, as FSDP2, torchtitan and `torch.distributed.checkpoint.save` write it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.format.safetensors_layout import StoredTensor
from shardwise.checkpoint.interchange import dcp_metadata
from shardwise.checkpoint.interchange.carried import PART_BYTES, Run
from shardwise.checkpoint.interchange.dcp_metadata import DcpTensor, Key
from shardwise.checkpoint.interchange.torch_file import SavedTensor, dtype_name, read_stream
from shardwise.checkpoint.interchange.tree import Tree
from shardwise.errors import CheckpointError, UnreadableError
from shardwise.sharded.dcp_chunks import runs_of


def read_dcp(directory: Path) -> Tree:
    """Everything in the directory by the way to it; tensors stay in their files. Raises CheckpointError."""
    metadata = dcp_metadata.read(directory)
    for place in {place.file: place for place in metadata.places()}.values():
        if not (directory / place.file).is_file():
            raise CheckpointError(f"{directory / place.file} is missing; {dcp_metadata.NAME} promises it")
    values: dict[Key, Any] = {}
    refused: dict[Key, str] = {}
    for key, place in metadata.objects.items():
        try:
            values[key] = read_stream(directory / place.file, place.start, place.nbytes)
        except UnreadableError:
            raise
        except CheckpointError as error:
            refused[key] = str(error)
    keys = {key: ".".join(map(str, key)) for key in metadata.tensors}
    return Tree(DcpTensors(directory, metadata.tensors), keys, values, refused)


class DcpTensors:
    """Tensors by the way to them, joined with dots."""

    def __init__(self, directory: Path, tensors: Mapping[Key, DcpTensor]) -> None:
        self._directory = directory
        self._tensors = {".".join(map(str, key)): tensor for key, tensor in tensors.items()}
        self.stored = {
            name: StoredTensor(name, dtype_name(getattr(torch, tensor.dtype), name), tensor.shape)
            for name, tensor in self._tensors.items()
        }
        self._chunk = lru_cache(maxsize=8)(self._open)

    def runs(self, name: str) -> Iterator[Run]:
        """Chunk by chunk."""
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
        """Gathered from the chunks that have it."""
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
                f"{self._directory / place.file} has at byte {place.start} something else than the part of {name!r} of "
                f"shape {box.sizes} and {tensor.dtype} that {dcp_metadata.NAME} promises"
            )
        return saved

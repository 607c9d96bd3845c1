"""Writes one full `.pt` file that `torch.load(weights_only=True)` reads: a dict of `model`, `optimizer`, `step`.

torch.save writes the file with room for the tensors, of which none exists yet; their bytes are then written in place.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.checkpoint.format.local_tensor import DTYPES, bytes_of
from shardwise.checkpoint.format.safetensors_layout import StoredTensor
from shardwise.checkpoint.interchange.carried import Carried, Tensors
from shardwise.checkpoint.interchange.nested import nested_state
from shardwise.checkpoint.interchange.torch_file import SavedTensor, read_stream
from shardwise.checkpoint.io.local_file import write_at
from shardwise.checkpoint.publish import commit
from shardwise.errors import CheckpointError


def write_pt(carried: Carried, target: Path) -> None:
    """Write the file: all there or not there. Raises CheckpointError.

    The file's zip entries carry no checksums (torch.load looks at none).
    """
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists already: convert to another path, or remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = commit.partial_of(target)
    try:
        without_data = torch.serialization.skip_data(materialize_fake_tensors=True)
        with partial.open("wb") as file, FakeTensorMode(), without_data:  # a file of Python's says what is wrong
            torch.save(nested_state(carried, lambda _, stored: _empty(stored)), file)
        _fill(partial, carried)
        commit.sync(partial)
        os.rename(partial, target)  # noqa: PTH104
        commit.sync(target.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _empty(stored: StoredTensor) -> Tensor:
    return torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="cpu")


def _fill(path: Path, carried: Carried) -> None:
    written: Any = read_stream(path)
    wanted: dict[str, dict[str, Any]] = nested_state(carried, lambda tensors, stored: (tensors, stored.name))
    with path.open("r+b", buffering=0) as file:
        for name, (tensors, own) in _without_ties(wanted["model"]).items():
            _copy(file.fileno(), written["model"][name], tensors, own)
        for fqn, state in wanted.get("optimizer", {}).get("state", {}).items():
            for kind, value in state.items():
                saved = written["optimizer"]["state"][fqn][kind]
                if isinstance(value, Tensor):
                    write_at(file.fileno(), saved.start, bytes_of(value.reshape(-1)))
                elif isinstance(value, tuple):
                    _copy(file.fileno(), saved, *value)


def _without_ties(model: dict[str, Any]) -> dict[str, Any]:
    """Each value under one of its names; torch.save has written it once, too."""
    firsts = {id(value): name for name, value in reversed(model.items())}
    return {name: model[name] for name in firsts.values()}


def _copy(fd: int, saved: SavedTensor, tensors: Tensors, name: str) -> None:
    for start, values in tensors.runs(name):
        write_at(fd, saved.start + start * saved.dtype.itemsize, bytes_of(values))

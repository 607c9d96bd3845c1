"""Full `.pt` files: what torch.save makes of a state_dict, or of several in a dict.

`torch.load(weights_only=True)` reads the files that are written here: a dict of `model`, `optimizer`, `step`.
torch.save writes such a file from fake tensors, with room for their bytes, which are then written in place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.checkpoint.format.local_tensor import DTYPES, bytes_of
from shardwise.checkpoint.format.safetensors_layout import StoredTensor
from shardwise.checkpoint.interchange.carried import Carried, Run, Tensors, parts
from shardwise.checkpoint.interchange.dcp_metadata import Key, dotted
from shardwise.checkpoint.interchange.nested import Tree, nested_state
from shardwise.checkpoint.interchange.torch_file import SavedTensor, read_stream
from shardwise.checkpoint.publish import commit
from shardwise.errors import CheckpointError
from shardwise.files.local_file import write_at

# Writing --------------------------------------------------------------------------------------------------------------


def write_pt(carried: Carried, target: Path) -> None:
    """Write the file: complete or absent. Raises CheckpointError.

    The file's zip entries carry no checksums (torch.load looks at none).
    """
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists already: convert to another path, or remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = commit.partial_of(target)
    try:
        without_data = torch.serialization.skip_data(materialize_fake_tensors=True)
        with partial.open("wb") as file, FakeTensorMode(), without_data:  # errors of a Python file name the cause
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
    """Return each value under one of its names; torch.save, too, has written it once."""
    firsts = {id(value): name for name, value in reversed(model.items())}
    return {name: model[name] for name in firsts.values()}


def _copy(fd: int, saved: SavedTensor, tensors: Tensors, name: str) -> None:
    for start, values in tensors.runs(name):
        write_at(fd, saved.start + start * saved.dtype.itemsize, bytes_of(values))


# Reading --------------------------------------------------------------------------------------------------------------


def read_pt(path: Path) -> Tree:
    """Return everything in the file by `Key`; tensors stay in it. Raises CheckpointError."""
    document = read_stream(path)
    if not isinstance(document, Mapping):
        what = "tensor" if isinstance(document, SavedTensor) else type(document).__name__
        raise CheckpointError(f"{path} holds a {what}, not a dict of tensors")
    found = dict(_leaves((), document))
    tensors = {key: value for key, value in found.items() if isinstance(value, SavedTensor)}
    values = {key: value for key, value in found.items() if not isinstance(value, SavedTensor)}
    keys = {key: dotted(key) for key in tensors}
    if len(set(keys.values())) < len(keys):
        raise CheckpointError(f"{path} has two tensors with the same name once nested names are joined with dots")
    return Tree(PtTensors({keys[key]: tensor for key, tensor in tensors.items()}), keys, values)


def _leaves(key: Key, value: Any) -> Iterator[tuple[Key, Any]]:
    """Yield each leaf with its key. Like DCP, this follows dicts, and lists that hold dicts, lists or tensors."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves((*key, str(name)), item)
    elif isinstance(value, list) and any(isinstance(item, (Mapping, list, SavedTensor)) for item in value):
        for number, item in enumerate(value):
            yield from _leaves((*key, number), item)
    else:
        yield key, value


class PtTensors:
    """The tensors of a `.pt` file, named by their keys, joined with dots."""

    def __init__(self, tensors: Mapping[str, SavedTensor]) -> None:
        self._tensors = tensors
        self.stored = {name: tensor.stored(name) for name, tensor in tensors.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See `Tensors`."""
        return self._tensors[name].read(start, stop)

    def runs(self, name: str) -> Iterator[Run]:
        """See `Tensors`. A tensor that is not contiguous in the file is one run."""
        tensor = self._tensors[name]
        if tensor.is_contiguous:
            yield from parts(self, name)
        elif self.stored[name].numel:  # stored in another order: read once, as a whole
            yield Run(0, tensor.read(0, self.stored[name].numel))

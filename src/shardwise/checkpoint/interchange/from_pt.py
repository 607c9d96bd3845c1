"""Tensors of a full `.pt` file: what torch.save made of a state_dict, or of several in a dict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwise.checkpoint.interchange.carried import Run, parts
from shardwise.checkpoint.interchange.dcp_metadata import Key
from shardwise.checkpoint.interchange.torch_file import SavedTensor, read_stream
from shardwise.checkpoint.interchange.tree import Tree
from shardwise.errors import CheckpointError


def read_pt(path: Path) -> Tree:
    """Everything in the file by the way to it; tensors stay in it. Raises CheckpointError."""
    document = read_stream(path)
    if not isinstance(document, Mapping):
        what = "tensor" if isinstance(document, SavedTensor) else type(document).__name__
        raise CheckpointError(f"{path} holds a {what}, not a dict of tensors")
    found = dict(_leaves((), document))
    tensors = {key: value for key, value in found.items() if isinstance(value, SavedTensor)}
    values = {key: value for key, value in found.items() if not isinstance(value, SavedTensor)}
    keys = {key: ".".join(map(str, key)) for key in tensors}
    if len(set(keys.values())) < len(keys):
        raise CheckpointError(f"{path} has two tensors of one name when nested names are joined with dots")
    return Tree(PtTensors({keys[key]: tensor for key, tensor in tensors.items()}), keys, values)


def _leaves(key: Key, value: Any) -> Iterator[tuple[Key, Any]]:
    """Dicts are followed, and lists that hold dicts or tensors, as DCP does it."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves((*key, str(name)), item)
    elif isinstance(value, list) and any(isinstance(item, (Mapping, list, SavedTensor)) for item in value):
        for number, item in enumerate(value):
            yield from _leaves((*key, number), item)
    else:
        yield key, value


class PtTensors:
    """Tensors by the way to them, joined with dots."""

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
        elif self.stored[name].numel:  # in another order: once as a whole
            yield Run(0, tensor.read(0, self.stored[name].numel))

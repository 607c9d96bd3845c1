"""What is in a checkpoint of any kind, as a conversion takes it from one kind to another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.format.local_tensor import NAMES
from shardwise.checkpoint.format.names_json import NamedTensor
from shardwise.checkpoint.format.safetensors_layout import StoredTensor
from shardwise.errors import CheckpointError


@dataclass(frozen=True, slots=True, eq=False)
class LazyTensor:
    """A tensor in a file, which is read when it is loaded. Tied tensors are the same object."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Tensor]
    """Reads it: plain, contiguous, of `shape`, on the CPU. Raises CheckpointError, UnreadableError."""

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * self.dtype.itemsize

    def stored(self, name: str) -> StoredTensor:
        """Return it as safetensors describes it. Raises CheckpointError if safetensors has no such dtype."""
        if self.dtype not in NAMES:
            raise CheckpointError(f"{name!r} has dtype {self.dtype}, which safetensors files cannot hold")
        return StoredTensor(name, NAMES[self.dtype], self.shape)


LazyTensors = Mapping[str, LazyTensor]
"""Tensors by name, in the order in which they are to be written."""


@dataclass(frozen=True)
class CheckpointContents:
    """A checkpoint of any kind."""

    model: LazyTensors
    """The model's tensors, named and cut as in the files of a checkpoint, which `names` maps to the model's; without
    `names`, as in the source."""
    state: LazyTensors = field(default_factory=dict)
    """The optimizer's state tensors, named `<fqn>.<state name>`."""
    optimizer: dict[str, Any] | None = None
    """The optimizer's groups and state by fqn, in the form of `training.json`; None without an optimizer."""
    step: int = 0
    extra: dict[str, Any] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files of the configuration and tokenizer, by name."""
    left_out: tuple[str, ...] = ()
    """Names of the source's other contents, which a checkpoint has no place for."""
    names: Sequence[NamedTensor] = ()
    """Those of the model's tensors that are named or cut differently in memory."""

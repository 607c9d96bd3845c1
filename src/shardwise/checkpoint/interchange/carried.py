"""The contents of a checkpoint of any kind, as a conversion carries them to another kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from shardwise.checkpoint.format.names_json import NamedTensor
from shardwise.checkpoint.format.safetensors_layout import StoredTensor

PART_BYTES = 32 * 2**20
"""Most bytes of a tensor in memory at once."""


class Run(NamedTuple):
    """Some consecutive elements of a flattened tensor."""

    start: int
    values: Tensor
    """1-D, plain, contiguous, on the CPU."""


class Tensors(Protocol):
    """Tensors by name, in files. Nothing is read before it is requested."""

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        """Names, dtypes and shapes, in the order in which they are to be written."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flattened tensor: 1-D, plain, on the CPU. Raises CheckpointError."""

    def runs(self, name: str) -> Iterator[Run]:
        """Yield every element once, in the order that suits the source, at most PART_BYTES at a time."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Some of a source's tensors under other names."""

    source: Tensors
    names: Mapping[str, str]
    """New name -> name in the source."""

    @property
    def stored(self) -> dict[str, StoredTensor]:
        """See `Tensors`; by the new names."""
        found = ((name, self.source.stored[old]) for name, old in self.names.items())
        return {name: StoredTensor(name, old.dtype, old.shape) for name, old in found}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See `Tensors`."""
        return self.source.read(self.names[name], start, stop)

    def runs(self, name: str) -> Iterator[Run]:
        """See `Tensors`."""
        return self.source.runs(self.names[name])


@dataclass(frozen=True)
class Carried:
    """A checkpoint of any kind."""

    model: Tensors
    """The model's tensors, named and cut as in the files of a checkpoint, which `names` maps to the model's; without
    `names`, as in the source."""
    state: Tensors
    """The optimizer's state tensors, named `<fqn>.<state name>`."""
    optimizer: dict[str, Any] | None = None
    """The optimizer's groups and state by fqn, in the form of `training.json`; None without an optimizer."""
    step: int = 0
    extra: dict[str, Any] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files of the configuration and tokenizer, by name."""
    left_out: tuple[str, ...] = field(default=())
    """Names of the source's other contents, which a checkpoint has no place for."""
    names: Sequence[NamedTensor] = ()
    """Those of the model's tensors that are named or cut differently in memory."""


def parts(tensors: Tensors, name: str) -> Iterator[Run]:
    """Implement `runs` for sources that can read any range."""
    tensor = tensors.stored[name]
    step = max(1, PART_BYTES // tensor.item_bytes)
    for start in range(0, tensor.numel, step):
        yield Run(start, tensors.read(name, start, min(start + step, tensor.numel)))

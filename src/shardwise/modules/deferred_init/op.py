"""A recorded operation of a tape. It refers to tensors by their place in a storage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class View:
    """A tensor's place in a recorded storage, which is given by number."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Draw:
    """The generator and the state from which an operation draws."""

    generator: torch.Generator
    source: int | Tensor
    """The operation that drew before this one, or the generator's state if it was set since."""
    is_free: bool
    """Whether the draw continues from the build's initial state; else the build set a seed, a state or a generator."""
    nbytes: int
    """Bytes that are drawn."""


@dataclass(frozen=True)
class Op:
    """One recorded operation. `reads` and `writes` are numbers of storages."""

    func: Callable[..., Any]
    args: Any
    """A pytree with `View`s in place of recorded tensors; other tensors are constants."""
    kwargs: Any
    reads: frozenset[int]
    writes: frozenset[int]
    replaces: bool
    """Whether it overwrites the storages that it writes completely, so that earlier writes do not matter."""
    outputs: tuple[View | None, ...]
    """For each tensor that it returns: its place if it has a new storage, else None."""
    draw: Draw | None

    @cached_property
    def touched(self) -> frozenset[int]:
        return self.reads | self.writes

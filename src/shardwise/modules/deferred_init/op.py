"""An operation on a tape, and how it names tensors: by their place in a storage."""

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
    """A place in a recorded storage, which has a number."""

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
    """Where an operation takes its random numbers from."""

    generator: torch.Generator
    source: int | Tensor
    """The operation that drew before this one, or the state that somebody set since."""
    is_free: bool
    """The numbers go on from where the build began; else the build itself has set a seed, a state or a generator."""
    nbytes: int
    """Of what is drawn."""


@dataclass(frozen=True)
class Op:
    """One operation."""

    func: Callable[..., Any]
    args: Any
    """A tree with views for recorded tensors; others are constants."""
    kwargs: Any
    reads: frozenset[int]
    writes: frozenset[int]
    replaces: bool
    """Nothing that was written before to the storages it writes remains."""
    outputs: tuple[View | None, ...]
    """By tensor that it returns: where that lies, if in a storage of its own."""
    draw: Draw | None

    @cached_property
    def touched(self) -> frozenset[int]:
        return self.reads | self.writes

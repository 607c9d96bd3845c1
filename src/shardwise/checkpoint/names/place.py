"""Where a model's tensor lies in the tensors of files, which may be called, cut and stacked otherwise."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.checkpoint.names.index_runs import Runs


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A tensor in a file that holds elements of one of the model's. Most often the whole of it: a name."""

    name: str
    shape: tuple[int, ...]
    """Of the stored tensor."""
    runs: Runs
    """From elements of the model's flattened tensor to elements of the stored one."""

    @staticmethod
    def whole(name: str, shape: Sequence[int]) -> Place:
        """A tensor stored as it is. The same object each time, while it is among the latest."""
        return _whole(name, tuple(shape))


@functools.lru_cache(maxsize=2**16)
def _whole(name: str, shape: tuple[int, ...]) -> Place:
    return Place(name, shape, Runs.one(math.prod(shape)))

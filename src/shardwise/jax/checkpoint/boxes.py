"""The part of an array that a process holds, as boxes: a start and a size in every dim."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from shardwise.checkpoint.names.index_map import IndexMap, Strided

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """Elements [start, start + size) of every dim."""

    start: Shape
    size: Shape

    @classmethod
    def of(cls, index: Sequence[slice], shape: Shape) -> Box:
        """Convert JAX's index of a shard, a slice for each dim of an array of this shape."""
        bounds = [one.indices(size)[:2] for one, size in zip(index, shape, strict=True)]
        return cls(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices that select this box from an array of the elements of `outer`, which must contain it."""
        begins = [start - first for start, first in zip(self.start, outer.start, strict=True)]
        return tuple(slice(begin, begin + size) for begin, size in zip(begins, self.size, strict=True))

    def row(self) -> Box:
        """Return the box without its first dim."""
        return Box(self.start[1:], self.size[1:])

    def has_row(self, row: int) -> bool:
        """Whether the box contains index `row` of the first dim."""
        return self.start[0] <= row < self.start[0] + self.size[0]

    def ordered(self, order: Sequence[int] | None) -> Box:
        """Return the box with its dims in this order; None: unchanged."""
        if order is None:
            return self
        return Box(tuple(self.start[dim] for dim in order), tuple(self.size[dim] for dim in order))

    def runs(self, shape: Shape) -> IndexMap:
        """Map the elements of a flattened array of `shape` to those of the flattened box.

        Raises ValueError if that takes too many runs of too few elements.
        """
        strides = _strides(shape)
        first = sum(start * stride for start, stride in zip(self.start, strides, strict=True))
        return IndexMap.paired(self.size, Strided(first, strides), Strided(0, _strides(self.size)))


def _strides(shape: Shape) -> Shape:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def joined(boxes: Iterable[Box]) -> list[list[Box]]:
    """Group boxes that do not overlap: one group if together they fill a box, else each alone. Drops empty boxes."""
    boxes = [box for box in boxes if box.numel]
    if len(boxes) > 1 and around(boxes).numel == sum(box.numel for box in boxes):
        return [boxes]
    return [[box] for box in boxes]


def around(boxes: Sequence[Box]) -> Box:
    """Return the smallest box that contains all of the boxes."""
    dims = range(len(boxes[0].start))
    start = tuple(min(box.start[dim] for box in boxes) for dim in dims)
    stop = tuple(max(box.start[dim] + box.size[dim] for box in boxes) for dim in dims)
    return Box(start, tuple(last - first for first, last in zip(start, stop, strict=True)))


@dataclass(frozen=True, slots=True)
class Held:
    """A box of an array in this process's memory, as one shard or several."""

    box: Box
    shards: Mapping[Box, Any]
    """By box, the arrays of JAX or numpy that together fill `box`."""

    def array(self, row: int | None) -> np.ndarray[Any, Any]:
        """Return the elements, or those of one row of the first dim. Shares memory where they are one host array."""
        parts = {
            (box if row is None else box.row()): np.asarray(data)
            if row is None
            else np.asarray(data)[row - box.start[0]]
            for box, data in self.shards.items()
            if row is None or box.has_row(row)
        }
        outer = self.box if row is None else self.box.row()
        if len(parts) == 1:
            return next(iter(parts.values()))
        whole = np.empty(outer.size, next(iter(parts.values())).dtype)
        for box, numbers in parts.items():
            whole[box.within(outer)] = numbers
        return whole


def to_write(array: Any, is_first: bool) -> list[Held]:
    """Return what this process writes of an array: each shard's replica 0, so that every element has one writer.

    is_first: whether this process writes the arrays that every host holds whole.
    """
    if not isinstance(array, jax.Array) or (jax.process_count() > 1 and array.is_fully_addressable):  # one a process
        everything = Box((0,) * array.ndim, array.shape)
        return [Held(everything, {everything: array})] if is_first and everything.numel else []
    own = {Box.of(shard.index, array.shape): shard.data for shard in array.addressable_shards if shard.replica_id == 0}
    return [Held(around(group), {box: own[box] for box in group}) for group in joined(own)]


def to_read(sharding: Sharding, shape: Shape) -> list[Box]:
    """Return the boxes that this process reads of an array that will have this sharding, each element once."""
    held = dict.fromkeys(
        Box.of(index, shape) for index in sharding.addressable_devices_indices_map(shape).values() if index is not None
    )
    return [around(group) for group in joined(held)]

"""Tensors that are renamed, cut and stacked: into the form that a model has in memory, or the form that files have.

Each consists of runs of elements of a source's tensors, which are read when it is read: only the requested part is in
memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from shardwise.checkpoint.format.local_tensor import DTYPES
from shardwise.checkpoint.format.names_json import NamedTensor
from shardwise.checkpoint.format.safetensors_layout import StoredTensor
from shardwise.checkpoint.interchange.carried import PART_BYTES, Run, Tensors, parts
from shardwise.checkpoint.names.index_map import IndexMap, tile
from shardwise.layout.ranges import Range


class _BoundedOrigin(NamedTuple):
    """Elements of a new tensor that are elements of the tensor `source`, and their bounds."""

    source: str
    runs: IndexMap
    """From elements of the new tensor to elements of the source."""
    span: Range
    """Range of the new tensor's elements that holds them all. With it, `read` skips most parts of a stack of
    experts."""

    @classmethod
    def of(cls, source: str, runs: IndexMap) -> Self:
        ends = (int(runs.here[0]), int(runs.here[-1] + runs.length[-1])) if len(runs) else (0, 0)
        return cls(source, runs, Range(*ends))


@dataclass(frozen=True, slots=True)
class Rearranged:
    """Tensors made of a source's elements; names that are not in `made` are the source's own tensors."""

    source: Tensors
    stored: Mapping[str, StoredTensor]
    made: Mapping[str, Sequence[_BoundedOrigin]]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See `Tensors`."""
        if name not in self.made:
            return self.source.read(name, start, stop)
        stored = self.stored[name]
        found = torch.empty(stop - start, dtype=DTYPES[stored.dtype], device="cpu")
        for source, runs, span in self.made[name]:
            if span.start >= stop or span.stop <= start:
                continue
            back = runs.within(start, stop).moved(here=-start).inverse()
            gathered_bytes = 8 * (len(back) > 1)  # for the element's index
            for part in back.stretches(max(1, PART_BYTES // (stored.item_bytes + gathered_bytes))):
                first = int(part.here[0])
                values = self.source.read(source, first, first + part.numel)
                if len(part) == 1:
                    found[int(part.there[0]) :][: part.numel] = values
                else:
                    found[torch.from_numpy(part.elements())] = values
        return found

    def runs(self, name: str) -> Iterator[Run]:
        """See `Tensors`."""
        return parts(self, name) if name in self.made else self.source.runs(name)


def as_in_memory(files: Tensors, names: Sequence[NamedTensor]) -> Tensors:
    """Return the tensors of files under the names that their model has for them, tied ones under the first.

    Raises ValueError if `names` belongs to other tensors than these.
    """
    made = {tensor.names[0]: [_BoundedOrigin.of(place.name, place.runs) for place in tensor.places] for tensor in names}
    _check(files, {place.name: place.shape for tensor in names for place in tensor.places})
    return _rearranged(files, made, {tensor.names[0]: tensor.shape for tensor in names})


def as_stored(model: Tensors, names: Sequence[NamedTensor]) -> Tensors:
    """Return the tensors of a model in memory as they are in files: the inverse of `as_in_memory`. Of tied ones the
    first is read.

    Raises ValueError if `names` belongs to other tensors than these.
    """
    made: dict[str, list[_BoundedOrigin]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in names:
        for place in tensor.places:
            made.setdefault(place.name, []).append(_BoundedOrigin.of(tensor.names[0], place.runs.inverse()))
            shapes[place.name] = place.shape
    _check(model, {name: tensor.shape for tensor in names for name in tensor.names})
    return _rearranged(model, made, shapes, {name for tensor in names for name in tensor.names[1:]})


def _check(source: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        if name not in source.stored or source.stored[name].shape != shape:
            raise ValueError(f"there is no {name!r} of shape {shape}")


def _rearranged(
    source: Tensors,
    made: Mapping[str, Sequence[_BoundedOrigin]],
    shapes: Mapping[str, tuple[int, ...]],
    tied: set[str] | frozenset[str] = frozenset(),
) -> Rearranged:
    """Return the tensors in the source's order, each new one at the place of the first tensor that it consists of."""
    of: dict[str, list[str]] = {}
    for name, found in made.items():
        for part in found:
            of.setdefault(part.source, []).append(name)
        if not tile([part.runs for part in found], math.prod(shapes[name])):
            raise ValueError(f"{name!r} is incomplete")
    stored: dict[str, StoredTensor] = {}
    for old in source.stored.values():
        if old.name not in of and old.name not in tied:
            if old.name in made:
                raise ValueError(f"there are two tensors named {old.name!r}")
            stored[old.name] = old
        for name in of.get(old.name, ()):
            if stored.setdefault(name, StoredTensor(name, old.dtype, shapes[name])).dtype != old.dtype:
                raise ValueError(f"{name!r} would have several dtypes")
    return Rearranged(source, stored, made)

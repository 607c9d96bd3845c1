"""Tensors that are renamed, cut and stacked: into the form that a model has in memory, or the form that files have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from shardwise.checkpoint.format.names_json import NamedTensor
from shardwise.checkpoint.interchange.checkpoint_contents import LazyTensor, LazyTensors
from shardwise.checkpoint.names.index_map import IndexMap, tile

_GATHERED_NUMEL = 4 * 2**20
"""Most elements that are gathered at a time, with an index of 8 bytes for each."""

Origins = Sequence[tuple[str, IndexMap]]
"""The tensors that a new one consists of, each with the map from the new tensor's elements to its own."""


def as_in_memory(files: LazyTensors, names: Sequence[NamedTensor]) -> LazyTensors:
    """Return the tensors of files under the names that their model has for them; tied ones are the same object.

    Raises ValueError if `names` belongs to other tensors than these.
    """
    made = {tensor.names[0]: [(place.name, place.runs) for place in tensor.places] for tensor in names}
    _check(files, {place.name: place.shape for tensor in names for place in tensor.places})
    found = _rearranged(files, made, {tensor.names[0]: tensor.shape for tensor in names})
    return found | {name: found[tensor.names[0]] for tensor in names for name in tensor.names[1:]}


def as_stored(model: LazyTensors, names: Sequence[NamedTensor]) -> LazyTensors:
    """Return the tensors of a model in memory as they are in files: the inverse of `as_in_memory`. Of tied ones the
    first is read.

    Raises ValueError if `names` belongs to other tensors than these.
    """
    made: dict[str, list[tuple[str, IndexMap]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in names:
        for place in tensor.places:
            made.setdefault(place.name, []).append((tensor.names[0], place.runs.inverse()))
            shapes[place.name] = place.shape
    _check(model, {name: tensor.shape for tensor in names for name in tensor.names})
    return _rearranged(model, made, shapes, {name for tensor in names for name in tensor.names[1:]})


def _check(source: LazyTensors, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        if name not in source or source[name].shape != shape:
            raise ValueError(f"there is no {name!r} of shape {shape}")


def _rearranged(
    source: LazyTensors, made: Mapping[str, Origins], shapes: Mapping[str, tuple[int, ...]], tied: Iterable[str] = ()
) -> dict[str, LazyTensor]:
    """Return the tensors in the source's order, each new one at the place of the first tensor that it consists of;
    those that are neither `tied` nor part of a new one stay as they are."""
    of: dict[str, list[str]] = {}
    for name, origins in made.items():
        for old, _ in origins:
            of.setdefault(old, []).append(name)
        if not tile([runs for _, runs in origins], math.prod(shapes[name])):
            raise ValueError(f"{name!r} is incomplete")
    read = lru_cache(maxsize=1)(lambda name: source[name].load())  # consecutive new tensors are of one stack
    found: dict[str, LazyTensor] = {}
    for old, tensor in source.items():
        if old not in of and old not in tied:
            if old in made:
                raise ValueError(f"there are two tensors named {old!r}")
            found[old] = tensor
        for name in of.get(old, ()):
            load = partial(_gathered, read, made[name], tensor.dtype, shapes[name])
            if found.setdefault(name, LazyTensor(tensor.dtype, shapes[name], load)).dtype != tensor.dtype:
                raise ValueError(f"{name!r} would have several dtypes")
    return found


def _gathered(read: Callable[[str], Tensor], origins: Origins, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    found = torch.empty(math.prod(shape), dtype=dtype, device="cpu")
    for name, runs in origins:
        values = read(name).reshape(-1)
        for part in runs.stretches(_GATHERED_NUMEL):
            into = found[int(part.here[0]) :][: part.numel]
            is_run = len(part) == 1
            into.copy_(
                values[int(part.there[0]) :][: part.numel] if is_run else values[torch.from_numpy(part.elements())]
            )
    return found.view(shape)

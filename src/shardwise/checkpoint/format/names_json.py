"""`names.json`: the model's names for the tensors of a checkpoint's files, where they differ from the files' names.

    {"format": 1,
     "tensors": [{"names": [...], "shape": [...], "places": [[name in a file, its shape there, runs], ...]}, ...]}

As in `names/index_map.py`, a run is [here, there, length]. With three more numbers (count, step here, step there) it
stands for `count` runs.

Files use transformers' names, and one of the names of a tied tensor. A model in memory, of FSDP2 for example, looks for
its own names. shardwise itself loads without this file, so it is written only if something differs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.checkpoint.format.contents import Contents
from shardwise.checkpoint.format.tensor_files import WritablePiece
from shardwise.checkpoint.names.index_map import IndexMap, Place, tile
from shardwise.errors import CheckpointError

NAME = "names.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True, eq=False)
class NamedTensor:
    """A tensor of a model that has another name than in the files, several names, or no stored tensor of its own."""

    names: tuple[str, ...]
    """Names in the model's state_dict; several are tied."""
    shape: tuple[int, ...]
    places: tuple[Place, ...]
    """Where its elements are stored."""


def of_pieces(pieces: Iterable[WritablePiece]) -> list[NamedTensor]:
    """Return the pieces whose names or places differ from the files'. Shapes and places are global, so any rank's
    pieces will do."""
    return [NamedTensor(piece.names, piece.shape, piece.places) for piece in pieces if not _is_plain(piece)]


def _is_plain(piece: WritablePiece) -> bool:
    if len(piece.names) > 1 or len(piece.places) > 1 or len(piece.places[0].runs) > 1:
        return False
    (place,) = piece.places
    runs = IndexMap.one(math.prod(piece.shape)).tuples()
    return (place.name, place.shape, place.runs.tuples()) == (piece.name, piece.shape, runs)


def encode(tensors: Sequence[NamedTensor]) -> bytes:
    """Return the file's bytes."""
    described = [
        {
            "names": tensor.names,
            "shape": tensor.shape,
            "places": [[place.name, place.shape, list(_progressions(place.runs))] for place in tensor.places],
        }
        for tensor in tensors
    ]
    return (json.dumps({"format": _FORMAT, "tensors": described}, separators=(",", ":")) + "\n").encode()


def decode(text: str | bytes, most_numel: int) -> list[NamedTensor]:
    """The inverse of `encode`. `most_numel`: elements of all of the model's tensors, which no tensor has more of.

    Raises ValueError, with the reason, for any other document.
    """
    try:
        document = json.loads(text)
        if document["format"] != _FORMAT:
            raise ValueError(f"format {document['format']!r} is unknown")
        return [_named(entry, most_numel) for entry in document["tensors"]]
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def read(contents: Contents, stored: Mapping[str, tuple[int, ...]]) -> list[NamedTensor]:
    """Read a checkpoint's `names.json`; empty if all names are the same, or if the version that saved it did not write
    the file. `stored`: the shapes of the tensors in the model's files.

    Raises CheckpointError if it is damaged.
    """
    if NAME not in contents.manifest.files:
        return []
    try:
        named = decode(contents.read(NAME), sum(map(math.prod, stored.values())))
        for tensor in named:
            for place in tensor.places:
                if stored.get(place.name) != place.shape:
                    raise ValueError(f"there is no {place.name!r} of shape {place.shape}")
        return named
    except (OSError, EOFError, ValueError) as error:
        raise CheckpointError(f"{contents}/{NAME} is damaged: {error}") from None


def _named(entry: Any, most_numel: int) -> NamedTensor:
    shape = _sizes(entry["shape"])
    if max(math.prod(shape), *(math.prod(_sizes(stored)) for _, stored, _ in entry["places"])) > most_numel:
        raise ValueError(f"a tensor of shape {shape} has more elements than the model")
    places = tuple(
        Place(str(name), _sizes(stored), _runs(runs, stored, most_numel)) for name, stored, runs in entry["places"]
    )
    names = tuple(entry["names"]) if isinstance(entry["names"], list) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{entry['names']!r} are no names")
    if not places or not tile([place.runs for place in places], math.prod(shape)):
        raise ValueError(f"{names} of shape {shape} are incomplete")
    return NamedTensor(names, shape, places)


def _sizes(shape: Any) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in shape)
    if min(sizes, default=0) < 0:
        raise ValueError(f"negative size in the shape {sizes}")
    return sizes


def _progressions(runs: IndexMap) -> Iterator[list[int]]:
    """Yield the entries for the runs. Runs of one length at equal distances form one entry: permuted rows and
    transposed matrices need few."""
    table = np.stack([runs.here, runs.there, runs.length], axis=1)
    steps = np.diff(table, axis=0)
    turns = np.flatnonzero((steps[1:] != steps[:-1]).any(axis=1)) + 1
    first = 0
    while first < len(table):
        last = first
        if first < len(steps) and steps[first, 2] == 0:
            turn = int(np.searchsorted(turns, first, "right"))
            last = int(turns[turn]) if turn < len(turns) else len(table) - 1
        run = table[first].tolist()
        yield run if last == first else [*run, last - first + 1, *steps[first, :2].tolist()]
        first = last + 1


def _runs(progressions: Any, stored: Sequence[int], most_numel: int) -> IndexMap:
    numel = math.prod(_sizes(stored))
    table = np.array([[*run, 1, 0, 0][:6] for run in progressions], dtype=np.int64).reshape(-1, 6)
    here, there, length, count, step_here, step_there = table.T
    farthest = np.abs(table[:, :2].astype(float)) + np.abs(table[:, 3:4] * table[:, 4:].astype(float))
    if (farthest > most_numel).any():  # before their sums overflow
        raise ValueError(f"runs go beyond a tensor of shape {tuple(stored)}")
    elements = sum(a * b for a, b in zip(length.tolist(), count.tolist(), strict=True))
    if (table[:, 2:4] < 1).any() or elements > numel:  # before memory for them is allocated
        raise ValueError(f"runs do not fit a tensor of shape {tuple(stored)}")
    number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    found = IndexMap(
        np.repeat(here, count) + number * np.repeat(step_here, count),
        np.repeat(there, count) + number * np.repeat(step_there, count),
        np.repeat(length, count),
    )
    ordered = IndexMap.joined([found])  # raises if they overlap
    back = ordered.inverse()
    if len(back) and (back.here[0] < 0 or back.here[-1] + back.length[-1] > numel):
        raise ValueError(f"runs go beyond a tensor of shape {tuple(stored)}")
    return ordered

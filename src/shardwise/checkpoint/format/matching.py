"""A model's tensors and a checkpoint's, matched by name: which bytes to read, and which tensors do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from shardwise.checkpoint.format import tensor_files
from shardwise.checkpoint.format.contents import Contents
from shardwise.checkpoint.format.local_tensor import DTYPES, OffloadedPiece, Piece
from shardwise.checkpoint.format.model_state import pieces_to_read
from shardwise.checkpoint.format.safetensors_layout import StoredTensor
from shardwise.checkpoint.format.tensor_files import TensorFiles
from shardwise.checkpoint.io.storage import Directory
from shardwise.checkpoint.names.index_map import Place
from shardwise.checkpoint.names.transformers_names import Found, Shape, find
from shardwise.checkpoint.names.wrappers import unwrapped_name
from shardwise.errors import CheckpointError, UsageError

_SHOWN = 3

Wanted = list[tuple[Piece, Place]]
Find = Callable[[nn.Module, Mapping[str, Shape], Mapping[str, Shape]], Found]


@dataclass
class Matched:
    """A model's tensors, matched with those in files."""

    wanted: Wanted = field(default_factory=list)
    """Pieces to read, each with a place to read from."""
    missing: list[str] = field(default_factory=list)
    """Names only in the model."""
    unexpected: dict[str, str] = field(default_factory=dict)
    """Names only in the files, each with what the model would call it."""
    wrong_shape: list[str] = field(default_factory=list)
    """Names in both with different shapes, each with its two shapes."""
    excused: set[str] = field(default_factory=set)
    """Names in `missing` and `unexpected` that are no reason to raise."""
    also: list[tuple[Piece, tuple[Place, ...]]] = field(default_factory=list)
    """For tied tensors that are stored under more than one name: the places that are not in `wanted`."""

    def fits(self, piece: Piece, shape: tuple[int, ...]) -> bool:
        """Return whether a stored tensor has the shape of a piece; if not, add it to `wrong_shape`."""
        if shape != piece.shape:
            self.wrong_shape.append(f"{piece.name} (here {piece.shape}, stored {shape})")
        return shape == piece.shape

    def check_dtypes(self, where: object, stored: Mapping[str, StoredTensor]) -> None:
        """Raise CheckpointError if a cast would change numbers by more than rounding."""
        for piece, place in self.wanted:
            dtype = DTYPES[stored[place.name].dtype]
            if not _takes(piece.tensor.dtype, dtype):
                raise CheckpointError(
                    f"{where}: {place.name!r} is stored as {dtype}, but {piece.name!r} is {piece.tensor.dtype} "
                    "here: one cannot be cast to the other"
                )

    def raise_differences(self, where: object, instead: str) -> None:
        """Raise CheckpointError, naming what does not fit, unless everything fits or is excused. `instead` tells the
        way out."""
        found = (
            ("missing from the checkpoint", self.missing),
            ("unexpected in the checkpoint", self.unexpected),
            ("with another shape", self.wrong_shape),
        )
        parts = [
            f"{what}: {shown(wrong)}"
            for what, names in found
            if (wrong := [name for name in names if name not in self.excused])
        ]
        if parts:
            raise CheckpointError(f"{where} does not fit: {'; '.join(parts)}. {instead}")


def match(model: nn.Module, stored: Mapping[str, StoredTensor], find: Find = find) -> Matched:
    """Match a sharded model's state_dict with stored tensors. No communication.

    Args:
        find: matches the names and shapes.

    Raises CheckpointError for a tensor that would have to be computed from stored ones, UsageError for an entry that is
    not a tensor or cannot be written to.
    """
    pieces = pieces_to_read(model)
    shapes = {name: piece.shape for piece in pieces for name in piece.names}
    plain = {unwrapped_name(name): name for name in stored}  # they may come from a compiled model
    found = find(model, shapes, {name: stored[theirs].shape for name, theirs in plain.items()})
    for name, places in found.places.items():
        found.places[name] = tuple(place.renamed(plain[place.name]) for place in places)
    matched = Matched(unexpected=dict(found.unexpected))
    for piece in pieces:
        names = [name for name in piece.names if name in found.places]
        if not names:
            matched.missing.append(piece.name)
        elif matched.fits(piece, found.shapes[names[0]]):
            _check_writable(piece)
            matched.wanted += [(piece, place) for place in found.places[names[0]]]
            for name in names[1:]:
                if found.shapes[name] == piece.shape:
                    matched.also.append((piece, found.places[name]))
                else:
                    matched.wrong_shape.append(f"{name} (here {piece.shape}, stored {found.shapes[name]})")
    return matched


def _check_writable(piece: Piece) -> None:
    if isinstance(piece, OffloadedPiece):
        return
    strides = zip(piece.tensor.stride(), piece.tensor.shape, strict=True)
    if piece.tensor.numel() and any(stride == 0 and size > 1 for stride, size in strides):
        raise UsageError(
            f"{piece.name!r} of shape {piece.shape} is expanded: several of its elements share one place in "
            "memory, so it cannot be read into. Register it as tensor.contiguous()"
        )


def _takes(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Return whether numbers of dtype `stored` keep their values in `dtype`, except for rounding. Complex, floating and
    whole numbers are not cast to one another; whole numbers need a dtype that has room for all of `stored`'s. Masks may
    be stored as bool or as uint8."""
    if (dtype.is_complex, dtype.is_floating_point) != (stored.is_complex, stored.is_floating_point):
        return False
    if dtype.is_complex or dtype.is_floating_point or stored == torch.bool or dtype == stored:
        return True
    if dtype == torch.bool:
        return stored == torch.uint8
    here, there = torch.iinfo(dtype), torch.iinfo(stored)
    return here.min <= there.min and there.max <= here.max


def shown(names: Iterable[str]) -> str:
    """Return the first few names as text, with the number of the others."""
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def check_ties(where: object, opened: Contents | Directory, files: TensorFiles, matched: Matched) -> int:
    """Raise CheckpointError if a tensor that is tied in the model, and stored under several names, is not the same
    under all of them. No communication: this rank's elements are compared.

    Returns the most bytes that were staged at one time to compare them.
    """
    staged_bytes = 0
    for piece, others in matched.also:
        own = [place for held, place in matched.wanted if held is piece]
        values = []
        for places in (own, others):
            staged = piece.with_tensor(torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype, device="cpu"))
            read = tensor_files.read(opened, files, [(staged, place) for place in places])
            values.append(staged.tensor)
            staged_bytes = max(staged_bytes, read.peak_staged_bytes + 2 * staged.tensor.nbytes)
        if not torch.equal(*values):
            raise CheckpointError(
                f"{where} holds different numbers for {own[0].name!r} and {others[0].name!r}, which the model "
                "ties: build the model with tie_word_embeddings=False"
            )
    return staged_bytes

"""Boxes of leaves as pieces of stored tensors, which implement `WritablePiece` and `ReadablePiece` of tensor files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.checkpoint.format.safetensors_layout import TORCH_NAMES, StoredTensor, TensorFile
from shardwise.checkpoint.format.tensor_files import Read
from shardwise.checkpoint.io.range_reader import RangeReader
from shardwise.checkpoint.names.index_map import IndexMap, Place
from shardwise.errors import CheckpointError, UsageError
from shardwise.files.direct import PAGE_BYTES, huge_page_buffer
from shardwise.fsdp.layout import round_up
from shardwise.jax.checkpoint.boxes import Box, Held, to_read, to_write
from shardwise.jax.checkpoint.leaves import Leaf
from shardwise.jax.checkpoint.name_map import LeafPlace

DTYPES: dict[str, np.dtype[Any]] = {name: jnp.dtype(other) for name, other in TORCH_NAMES.items()}
"""numpy dtypes by their names in safetensors files."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGN_BYTES = 64
_Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class _StoredBox:
    """A box of one stored tensor."""

    tensor: StoredTensor
    box: Box
    """The box's place in the stored tensor."""

    @property
    def name(self) -> str:
        """See `WritablePiece`."""
        return self.tensor.name

    @property
    def names(self) -> tuple[str, ...]:
        """See `WritablePiece`."""
        return (self.name,)

    @property
    def shape(self) -> tuple[int, ...]:
        """See `WritablePiece`."""
        return self.tensor.shape

    @property
    def places(self) -> tuple[Place, ...]:
        """See `WritablePiece`."""
        return (Place.whole(self.name, self.shape),)

    @property
    def stored(self) -> Sequence[StoredTensor]:
        """See `WritablePiece`."""
        return (self.tensor,)

    def held_at(self, place: Place) -> IndexMap:
        """See `WritablePiece`. Raises UsageError if the box is cut into too many runs."""
        try:
            return self.box.runs(self.shape)
        except ValueError as error:
            raise UsageError(
                f"{self.name!r} of shape {self.shape} is sharded so that this process's part of it cannot be "
                f"read or written by ranges: {error}; shard another dim"
            ) from None


@dataclass(frozen=True, slots=True, eq=False)
class PieceToWrite(_StoredBox):
    """The part of a stored tensor that this process writes."""

    held: Held
    part: LeafPlace

    def numbers(self) -> _Array:
        """Return the elements flattened in the file's order. Shares JAX's memory where that has the same order."""
        array = self.held.array(self.part.row)
        return np.ascontiguousarray(array if self.part.order is None else array.transpose(self.part.order)).reshape(-1)

    def chunks(self, runs: IndexMap) -> Iterator[tuple[int, memoryview]]:
        """See `WritablePiece`."""
        data, item_bytes = bytes_of(self.numbers()), self.tensor.item_bytes
        for here, there, length in runs.tuples():
            yield here, data[there * item_bytes : (there + length) * item_bytes]


@dataclass(frozen=True, slots=True, eq=False)
class _CopiedPiece(_StoredBox):
    """A piece to write whose elements were copied."""

    data: memoryview

    def chunks(self, runs: IndexMap) -> Iterator[tuple[int, memoryview]]:
        """See `WritablePiece`."""
        item_bytes = self.tensor.item_bytes
        for here, there, length in runs.tuples():
            yield here, self.data[there * item_bytes : (there + length) * item_bytes]


def bytes_of(flat: _Array) -> memoryview:
    """Return the memory of a 1-D contiguous array, shared, not copied."""
    return flat.view(np.uint8).data if flat.size else memoryview(b"")


def copied(pieces: Sequence[PieceToWrite]) -> list[_CopiedPiece]:
    """Copy the pieces' elements, so that a later step may donate the arrays without changing what is written."""
    sizes = [round_up(piece.box.numel * piece.tensor.item_bytes, _ALIGN_BYTES) for piece in pieces]
    memory = huge_page_buffer(round_up(sum(sizes), PAGE_BYTES))
    copies, start = [], 0
    for piece, nbytes in zip(pieces, sizes, strict=True):
        own = bytes_of(piece.numbers())
        place = memory[start : start + own.nbytes]
        place[:] = own
        copies.append(_CopiedPiece(piece.tensor, piece.box, place))
        start += nbytes
    return copies


def stored_tensors(leaf: Leaf, parts: Sequence[LeafPlace]) -> list[StoredTensor]:
    """Return the stored tensors that a leaf is written to. Raises UsageError if safetensors lacks its dtype."""
    if leaf.dtype not in _NAMES:
        raise UsageError(f"{leaf.path!r} has dtype {leaf.dtype}, which safetensors files cannot hold")
    return [StoredTensor(part.name, _NAMES[leaf.dtype], part.shape_in_file(leaf.shape)) for part in parts]


def pieces_to_write(
    leaf: Leaf, parts: Sequence[LeafPlace], tensors: Sequence[StoredTensor], is_first: bool
) -> Iterator[PieceToWrite]:
    """Yield the pieces of a leaf that this process writes. Does not communicate."""
    for held in to_write(leaf.stored(), is_first):
        for part, tensor in zip(parts, tensors, strict=True):
            if part.row is None or held.box.has_row(part.row):
                yield PieceToWrite(tensor, _in_file(held.box, part), held, part)


def _in_file(box: Box, part: LeafPlace) -> Box:
    return (box if part.row is None else box.row()).ordered(part.order)


# Reading --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class PieceToRead(_StoredBox):
    """The part of a stored tensor that this process reads into `flat`, in the order and dtype of the file."""

    flat: _Array
    target: _Array | None = None
    """View of the leaf's elements, in the dim order of the file, that `finish` copies `flat` to; None if `flat` is that
    view itself."""
    is_whole: bool = False

    def begin_overwrite(self) -> bool:
        """See `ReadablePiece`."""
        return bool(self.flat.size)

    def fill(self, reader: RangeReader, layout: TensorFile, place: Place, past_cache: bool) -> Read:
        """See `ReadablePiece`."""
        data, item_bytes = bytes_of(self.flat), self.tensor.item_bytes
        for here, there, length in self.held_at(place).tuples():
            start = layout.byte_range(place.name, here, here + length).start
            reader.ask(start, data[there * item_bytes : (there + length) * item_bytes], past_cache)
        return Read(self.flat.nbytes, 0 if self.target is None else self.flat.nbytes)

    def finish(self) -> None:
        """Copy what was read to `target`."""
        if self.target is not None:
            self.target[...] = self.flat.reshape(self.box.size)


@dataclass(slots=True)
class LeafToRead:
    """A leaf while it is read: the boxes of it that this process will hold, and the pieces that fill them."""

    leaf: Leaf
    parts: Sequence[LeafPlace]
    tensors: Sequence[StoredTensor]
    boxes: dict[Box, _Array] = field(default_factory=dict)
    pieces: list[PieceToRead] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Upper bound of the bytes of host memory that reading the leaf takes."""
        items = sum(box.numel for box in to_read(self.leaf.sharding, self.leaf.shape))
        return 2 * items * max((tensor.item_bytes for tensor in self.tensors), default=0)

    def begin(self) -> list[PieceToRead]:
        """Allocate the boxes, and return the pieces that have to be read into them."""
        stored = {tensor.dtype for tensor in self.tensors}
        dtype = DTYPES[stored.pop()] if len(stored) == 1 else self.leaf.dtype  # rows may differ in dtype
        for box in to_read(self.leaf.sharding, self.leaf.shape):
            room = self.boxes[box] = np.empty(box.size, dtype)
            for part, tensor in zip(self.parts, self.tensors, strict=True):
                if part.row is None or box.has_row(part.row):
                    view = room if part.row is None else room[part.row - box.start[0] : part.row - box.start[0] + 1]
                    self.pieces.append(_piece_to_read(view, box, part, tensor))
        return self.pieces

    def finish(self) -> Any:
        """Return the leaf's value, an array of JAX unless it is on the host. Does not communicate."""
        for piece in self.pieces:
            piece.finish()
        value = self.leaf.restored(self._array())
        self.boxes.clear()
        self.pieces.clear()
        return value

    def _array(self) -> Any:
        if self.leaf.is_on_host:
            return self._cast(next(iter(self.boxes.values())))

        def numbers(index: tuple[slice, ...] | None) -> _Array:
            wanted = Box.of(index or (), self.leaf.shape)
            if not wanted.numel:
                return np.empty(wanted.size, self.leaf.dtype)
            outer = next(box for box in self.boxes if _contains(box, wanted))
            return self._cast(self.boxes[outer][wanted.within(outer)])

        return jax.make_array_from_callback(self.leaf.shape, self.leaf.sharding, numbers)

    def _cast(self, numbers: _Array) -> _Array:
        """Cast to the leaf's dtype. Raises CheckpointError for integers that it cannot hold."""
        cast = numbers.astype(self.leaf.dtype, copy=False)
        if cast is not numbers and np.issubdtype(cast.dtype, np.integer) and not np.array_equal(cast, numbers):
            raise CheckpointError(
                f"{self.leaf.path!r} holds whole numbers from {numbers.min()} to {numbers.max()}, which "
                f"{self.leaf.dtype} cannot hold: load it as {numbers.dtype}"
            )
        return cast


def _piece_to_read(view: _Array, box: Box, part: LeafPlace, tensor: StoredTensor) -> PieceToRead:
    """Return the piece that fills `view`, directly if it has the file's order and dtype, else through a buffer.

    view: of the leaf's elements, in the leaf's dim order; one row, with its dim, if the part is a row.
    """
    in_file = _in_file(box, part)
    own = view if part.row is None else view[0]
    if part.order is None and own.dtype == DTYPES[tensor.dtype] and own.flags.c_contiguous:
        return PieceToRead(tensor, in_file, own.reshape(-1))
    staged = np.empty(in_file.numel, DTYPES[tensor.dtype])
    return PieceToRead(tensor, in_file, staged, own if part.order is None else own.transpose(part.order))


def _contains(outer: Box, inner: Box) -> bool:
    return all(
        first <= start and start + size <= first + whole
        for first, whole, start, size in zip(outer.start, outer.size, inner.start, inner.size, strict=True)
    )

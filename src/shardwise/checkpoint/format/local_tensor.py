"""A piece: one tensor of a checkpoint, and the part of it on this rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.format.safetensors_layout import TORCH_NAMES, StoredTensor, TensorFile
from shardwise.checkpoint.format.tensor_files import Read
from shardwise.checkpoint.io.range_reader import RangeReader
from shardwise.checkpoint.names.index_map import IndexMap, Place, Strided
from shardwise.checkpoint.ranks.consensus import Peers
from shardwise.errors import UsageError
from shardwise.fsdp.collectives import Collectives
from shardwise.fsdp.sharded_parameter import Part, ShardedParameter
from shardwise.layout.ranges import Range, share
from shardwise.offload.offloaded_state import OffloadedState
from shardwise.sharded.extensions.blocks import BLOCK_NUMEL
from shardwise.sharded.extensions.few_bits import FewBitsParameter
from shardwise.sharded.extensions.offloaded import slice_of

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()}
"""torch dtypes by their names in safetensors files."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK_BYTES = 32 * 2**20
"""Bytes staged at a time if a piece cannot be written from, or read into, its memory directly."""
_FEW_RUNS = 64
"""Runs that are copied one by one, if they are not alike."""
_GAP_BYTES = 64 * 2**10
"""Ranges of a file that are shorter on average are read together, with gaps of up to so many bytes between them."""


@dataclass(slots=True, eq=False)  # not frozen: that takes three times as long to create, and training waits for it
class Piece:
    """Elements [start, start + tensor.numel()) of a flattened (row-major) tensor of the global `shape`, or of the part
    of it in `within`."""

    names: tuple[str, ...]
    """Names that the state_dict has for the tensor. It is written under the first; the others are tied to it."""
    shape: tuple[int, ...]
    tensor: Tensor
    """A plain tensor: this rank's piece, 1-D and contiguous, or the whole tensor if every rank holds it."""
    start: int
    is_whole: bool
    """Whether it is not sharded: then rank 0's is written, and every rank reads all of it."""
    places: tuple[Place, ...]
    """Where its elements are written: for most tensors, to one whole tensor of the same name."""
    ranks: int = 1
    """Number of ranks that the tensor, or the part of it in `within`, is spread over. If there are others in the mesh,
    they are replicas with equal pieces."""
    within: Part | None = None
    """The part of the tensor that the shard group holds; None: all of it."""
    axes: tuple[Collectives, ...] = ()
    """Groups of ranks that hold other parts."""

    @property
    def name(self) -> str:
        """The name under which it is written: the first of `names`."""
        return self.names[0]

    @property
    def held(self) -> Range:
        """Elements of the flattened global tensor, or of its part in `within`, that this rank holds."""
        return Range(self.start, self.start + self.tensor.numel())

    @property
    def stored(self) -> list[StoredTensor]:
        """The stored tensors, whole, that the piece's elements are written to."""
        return [StoredTensor(place.name, NAMES[self.tensor.dtype], place.shape) for place in self.places]

    def held_at(self, place: Place) -> IndexMap:
        """Return the map from elements of the stored tensor to this rank's elements of flattened `self.tensor`."""
        if self.within is not None:
            return held_in(self.within, self.shape, self.held, place)
        return place.runs.within(*self.held).moved(here=-self.start).inverse()

    def to_write(self, peers: Peers) -> Piece | None:
        """Return the part of it that this rank writes, 1-D, without a copy if possible; None if there is none.

        Replicas share the work. An empty part of a tensor that is cut is returned too: see `RowExchange`.
        """
        if self.is_whole:
            elements = self.held if peers.is_first else Range(0, 0)
        else:
            number, copies = peers.copy_of(self.ranks, self.axes)
            if copies == 1:
                return self if self.tensor.numel() or self.axes else None
            elements = share(self.held, copies, number)
        if not elements.length and not self.axes:
            return None
        flat = self.tensor.reshape(-1)[elements.start - self.start : elements.stop - self.start]
        return self.part(flat, elements.start)

    def part(self, flat: Tensor, start: int) -> Piece:
        """Return a piece of the elements `flat` of this one, which begin at element `start` of the global tensor."""
        return Piece(self.names, self.shape, flat, start, False, self.places, self.ranks, self.within, self.axes)

    def with_tensor(self, tensor: Tensor) -> Piece:
        """Return the same piece with its numbers in `tensor`. (`dataclasses.replace` takes five times as long.)"""
        whole = self.is_whole
        return Piece(self.names, self.shape, tensor, self.start, whole, self.places, self.ranks, self.within, self.axes)

    def chunks(self, runs: IndexMap) -> Iterator[tuple[int, memoryview]]:
        """See `WritablePiece`. Copies nothing if the elements are in CPU memory in order."""
        flat = self.tensor.reshape(-1)
        for part in runs.stretches(_step(flat.itemsize, runs)):
            values = _at(flat, part).cpu().resolve_conj().resolve_neg()  # else lazy conj and neg would be lost
            yield int(part.here[0]), bytes_of(values.contiguous())

    def copy_to(self, memory: Tensor) -> None:
        """Copy the elements to `memory`, 1-D and of the same dtype, on the current stream."""
        memory.copy_(self.tensor, non_blocking=True)

    def begin_overwrite(self) -> bool:
        """See `ReadablePiece`. Empty pieces get a new version too: all ranks must see the same change."""
        torch.autograd.graph.increment_version(self.tensor)
        return bool(self.tensor.numel())

    def fill(self, reader: RangeReader, layout: TensorFile, place: Place, past_cache: bool) -> Read:
        """See `ReadablePiece`. Elements that need no staging have arrived only after `reader.finish()`."""
        dtype, target = DTYPES[layout.tensors[place.name].dtype], self.tensor
        flat = target.view(-1) if target.is_contiguous() else target.flatten()  # a view, or a copy
        runs = self.held_at(place)
        as_stored = flat.dtype == dtype and flat.device.type == "cpu" and not (flat.is_conj() or flat.is_neg())
        direct = target.is_contiguous() and as_stored
        step = max(1, runs.numel) if direct and len(runs) == 1 else _step(dtype.itemsize, runs)
        is_short = runs.numel * dtype.itemsize < len(runs) * _GAP_BYTES
        staged_bytes = 0
        for part in runs.stretches(step, _GAP_BYTES // dtype.itemsize if is_short else 0):
            in_place = direct and len(part) == 1
            start, stop = int(part.here[0]), int(part.here[-1] + part.length[-1])
            chunk = _at(flat, part) if in_place else torch.empty(stop - start, dtype=dtype, device="cpu")
            reader.ask(layout.byte_range(place.name, start, start).start, bytes_of(chunk), past_cache)
            if not in_place:
                reader.finish()
                staged_bytes = max(staged_bytes, _put(chunk, flat, part))
        if not target.is_contiguous():
            target.copy_(flat.view(target.shape))
            staged_bytes += flat.nbytes
        return Read(runs.numel * dtype.itemsize, staged_bytes)


@dataclass(slots=True, eq=False)
class OffloadedStatePiece(Piece):
    """Offloaded optimizer state: `tensor` has its number of elements, but no memory for them."""

    state: OffloadedState = field(kw_only=True)
    skipped: int = 0
    """Elements of this rank's state that come before the piece."""

    def part(self, flat: Tensor, start: int) -> Piece:
        """See `Piece`."""
        skipped = self.skipped + start - self.start
        return OffloadedStatePiece(
            self.names, self.shape, flat, start, False, self.places, self.ranks, skipped=skipped, state=self.state
        )

    def chunks(self, runs: IndexMap) -> Iterator[tuple[int, memoryview]]:
        """See `WritablePiece`. Reads from the tier a chunk at a time."""
        assert len(runs) <= 1, "state is stored as it is"
        for part in runs.stretches(_step(self.tensor.itemsize, runs)):
            chunk = torch.empty(part.numel, dtype=self.tensor.dtype)
            self.state.allocation.check()
            self.state.allocation.tier.read_into(self._byte(int(part.there[0])), chunk)
            yield int(part.here[0]), bytes_of(chunk)

    def fill(self, reader: RangeReader, layout: TensorFile, place: Place, past_cache: bool) -> Read:
        """See `ReadablePiece`. Writes to the tier a chunk at a time."""
        runs = self.held_at(place)
        dtype, staged_bytes = DTYPES[layout.tensors[place.name].dtype], 0
        for part in runs.stretches(_step(dtype.itemsize, runs)):
            chunk = torch.empty(part.numel, dtype=dtype)
            start = layout.byte_range(place.name, int(part.here[0]), int(part.here[0])).start
            reader.ask(start, bytes_of(chunk), past_cache)
            reader.finish()
            self.state.allocation.tier.write_from(self._byte(int(part.there[0])), chunk.to(self.tensor.dtype))
            staged_bytes = max(staged_bytes, chunk.nbytes)
        return Read(runs.numel * dtype.itemsize, staged_bytes)

    def _byte(self, element: int) -> int:
        return self.state.start + (self.skipped + element) * self.tensor.itemsize


@dataclass(slots=True, eq=False)
class OffloadedPiece(Piece):
    """A parameter whose shard is offloaded: `tensor` has its number of elements, but no memory for them."""

    parameter: ShardedParameter = field(kw_only=True)
    skipped: int = 0
    """Elements of this rank's piece of the parameter that come before this one."""

    def part(self, flat: Tensor, start: int) -> Piece:
        """See `Piece`."""
        skipped = self.skipped + start - self.start
        return OffloadedPiece(
            self.names,
            self.shape,
            flat,
            start,
            False,
            self.places,
            self.ranks,
            skipped=skipped,
            parameter=self.parameter,
        )

    def chunks(self, runs: IndexMap) -> Iterator[tuple[int, memoryview]]:
        """See `WritablePiece`. The shard stays in memory until the last chunk is written."""
        yield from self._here().chunks(runs)

    def begin_overwrite(self) -> bool:
        """See `ReadablePiece`."""
        assert self.parameter.unit is not None
        self.parameter.unit.stepped()
        return bool(self.tensor.numel())

    def fill(self, reader: RangeReader, layout: TensorFile, place: Place, past_cache: bool) -> Read:
        """See `ReadablePiece`. The shard stays in memory until another one is needed."""
        here = self._here()
        here.begin_overwrite()
        done = here.fill(reader, layout, place, past_cache)
        reader.finish()
        return done

    def _here(self) -> Piece:
        return self.with_tensor(self.parameter.peek().detach()[self.skipped : self.skipped + self.tensor.numel()])


@dataclass(slots=True, eq=False)
class PieceInFewBits(Piece):
    """A piece of a frozen parameter that is kept in blocks of few bits but stored in full: `tensor` has its number of
    elements, on the meta device."""

    parameter: FewBitsParameter = field(kw_only=True)
    _arriving: Tensor | None = None
    """The piece's numbers, while they are read in parts that are not whole blocks; otherwise None."""
    _missing: int = 0
    """Elements of `_arriving` that have not been read yet."""

    def part(self, flat: Tensor, start: int) -> Piece:
        """See `Piece`."""
        return PieceInFewBits(
            self.names, self.shape, flat, start, False, self.places, self.ranks, parameter=self.parameter
        )

    def chunks(self, runs: IndexMap) -> Iterator[tuple[int, memoryview]]:
        """See `WritablePiece`. Decodes a chunk at a time, or everything if elements are stored in another order."""
        flat = self._read(0, self.tensor.numel()) if len(runs) > 1 else None
        for part in runs.stretches(_step(self.tensor.itemsize, runs)):
            first = int(part.there[0])
            values = self._read(first, first + part.numel) if flat is None else _at(flat, part)
            yield int(part.here[0]), bytes_of(values.cpu())

    def _read(self, first: int, last: int) -> Tensor:
        """Return elements [first, last) of this piece, decoded."""
        start = self.start + first
        skipped = (start - self.parameter.fragment.start) % BLOCK_NUMEL
        return self.parameter.read(start - skipped, self.start + last)[skipped:]

    def begin_overwrite(self) -> bool:
        """See `ReadablePiece`."""
        self.parameter.begin_overwrite()
        return bool(self.tensor.numel())

    def fill(self, reader: RangeReader, layout: TensorFile, place: Place, past_cache: bool) -> Read:
        """See `ReadablePiece`. Encodes a chunk at a time if the whole piece is stored there in order; otherwise the
        piece is assembled first, in memory of its own."""
        dtype, numel = DTYPES[layout.tensors[place.name].dtype], self.tensor.numel()
        runs = self.held_at(place)
        in_order = len(runs) == 1 and runs.numel == numel
        if not in_order and self._arriving is None:
            self._arriving, self._missing = torch.empty(numel, dtype=self.tensor.dtype), numel
        staged_bytes = 0
        for part in runs.stretches(_step(dtype.itemsize, runs) // BLOCK_NUMEL * BLOCK_NUMEL):
            chunk, start = torch.empty(part.numel, dtype=dtype), int(part.here[0])
            reader.ask(layout.byte_range(place.name, start, start).start, bytes_of(chunk), past_cache)
            reader.finish()
            if self._arriving is None:
                self.parameter.write_at(int(part.there[0]), chunk)
                staged_bytes = max(staged_bytes, chunk.nbytes)
            else:
                staged_bytes = max(staged_bytes, _put(chunk, self._arriving, part) + self._arriving.nbytes)
                self._missing -= part.numel
        if self._arriving is not None and not self._missing:
            self.parameter.write_at(0, self._arriving)
            self._arriving = None
        return Read(runs.numel * dtype.itemsize, staged_bytes)


def _at(flat: Tensor, part: IndexMap) -> Tensor:
    """Return the elements of `flat` that the map leads to: a view of them if they are one run."""
    if len(part) == 1:
        return flat[int(part.there[0]) : int(part.there[0] + part.length[0])]
    return flat[torch.from_numpy(part.elements()).to(flat.device)]


def _step(item_bytes: int, runs: IndexMap) -> int:
    """Return how many elements to take at once; if they are gathered, their indices, 8 bytes each, are staged too."""
    return max(1, _CHUNK_BYTES // (item_bytes if len(runs) == 1 else item_bytes + 8))


def bytes_of(flat: Tensor) -> memoryview:
    """Return the memory of a 1-D, contiguous tensor on the CPU. Shared, not copied."""
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _put(chunk: Tensor, flat: Tensor, part: IndexMap) -> int:
    """Copy elements that were read, from the first one in `part` on, to their places in `flat`. Returns the bytes that
    were staged, `chunk` included."""
    if len(part) == 1:
        _at(flat, part).copy_(chunk)
        return chunk.nbytes
    cast = chunk.to(flat.device, flat.dtype)
    more_bytes = copy_runs(cast, flat, part.moved(here=-int(part.here[0])))
    return chunk.nbytes + more_bytes + (cast.nbytes if cast is not chunk else 0)


def copy_runs(source: Tensor, target: Tensor, runs: IndexMap) -> int:
    """Copy elements of `source`, here, to those of `target`, there; both 1-D and on one device.

    Returns the bytes that were staged: none if all runs but the first and the last are equally long and equally far
    apart.
    """
    ends = runs.tuples() if len(runs) <= _FEW_RUNS else None
    steps = [np.diff(side[1:-1]) for side in (runs.here, runs.there)]
    if len(runs) > 3 and all((each == each[0]).all() and each[0] > 0 for each in (*steps, runs.length[1:-1])):
        sides = zip((source, target), (runs.here, runs.there), steps, strict=True)
        shape = len(runs) - 2, int(runs.length[1])
        rows, places = (
            tensor.as_strided(shape, (int(step[0]), 1), tensor.storage_offset() + int(side[1]))
            for tensor, side, step in sides
        )
        places.copy_(rows)
        ends = [(int(runs.here[at]), int(runs.there[at]), int(runs.length[at])) for at in (0, -1)]
    if ends is None:
        places, values, staged_bytes = torch.from_numpy(runs.elements()), source, 0
        if runs.numel < source.numel():
            here = torch.from_numpy(IndexMap(runs.here, runs.here, runs.length).elements())
            values = source[here.to(source.device)]
            staged_bytes = here.nbytes + values.nbytes
        target[places.to(target.device)] = values
        return staged_bytes + places.nbytes
    for first, at, numel in ends:
        target[at : at + numel] = source[first : first + numel]
    return 0


@functools.lru_cache(maxsize=256)  # a parameter and its state, and those of all blocks, have few different ones
def _map_of(part: Part, shape: tuple[int, ...]) -> IndexMap:
    """Return the map from elements of a flattened part of a tensor to those of the flattened tensor."""
    own = _row_major([sum(stop - start for start, stop in ranges) for ranges in part])
    strides, maps = _row_major(shape), []
    by_dim = [list(zip(accumulate((b - a for a, b in ranges), initial=0), ranges, strict=False)) for ranges in part]
    for block in product(*by_dim):
        here = sum(at * stride for (at, _), stride in zip(block, own, strict=True))
        there = sum(start * stride for (_, (start, _)), stride in zip(block, strides, strict=True))
        sizes = [stop - start for _, (start, stop) in block]
        maps.append(IndexMap.paired(sizes, Strided(here, own), Strided(there, strides)))
    return IndexMap.joined(maps)


def held_in(part: Part, shape: tuple[int, ...], held: Range, place: Place) -> IndexMap:
    """Return the map from elements of a stored tensor to those that a rank holds, counted from its first: elements
    `held` of a flattened part of a tensor of `shape`."""
    if len(place.runs) == 1 and place.runs.numel == math.prod(shape) == math.prod(place.shape):
        return _held_in_order(part, shape, held)
    return _map_of(part, shape).within(*held).through(place.runs).moved(here=-held.start).inverse()


@functools.lru_cache(maxsize=64)
def _held_in_order(part: Part, shape: tuple[int, ...], held: Range) -> IndexMap:
    return _map_of(part, shape).within(*held).moved(here=-held.start).inverse()


def _row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def piece_of(names: Sequence[str], tensor: Tensor, places: tuple[Place, ...] | None = None) -> Piece:
    """Return this rank's part of a parameter, buffer or state tensor. Shares its memory.

    Without `places` it is stored as it is, under its first name. Raises UsageError if safetensors has no such dtype.
    """
    if tensor.dtype not in NAMES:
        raise UsageError(f"{names[0]!r} has dtype {tensor.dtype}, which safetensors files cannot hold")
    places = places or (Place.whole(names[0], tensor.shape),)
    if isinstance(tensor, ShardedParameter):
        ranks, start, shape = tensor.placement.shard_group.world_size, tensor.fragment.start, tuple(tensor.shape)
        if isinstance(tensor, FewBitsParameter):
            meta = torch.empty(tensor.fragment.numel, dtype=tensor.dtype, device="meta")
            return PieceInFewBits(tuple(names), shape, meta, start, False, places, ranks, parameter=tensor)
        like = torch.empty(1, dtype=tensor.dtype).expand(tensor.fragment.numel)
        if isinstance(tensor, OffloadedState):
            return OffloadedStatePiece(tuple(names), shape, like, start, False, places, ranks, state=tensor)
        if slice_of(tensor) is not None:
            return OffloadedPiece(tuple(names), shape, like, start, False, places, ranks, parameter=tensor)
        part, axes = tensor.placement.part, tensor.placement.groups[1:]
        return Piece(tuple(names), shape, tensor.local.detach(), start, False, places, ranks, part, axes)
    return Piece(tuple(names), tuple(tensor.shape), tensor.detach(), 0, True, places)

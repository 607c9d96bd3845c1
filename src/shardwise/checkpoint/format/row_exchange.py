"""Tensors that a tensor axis cuts across their rows, exchanged along it so that each rank writes whole rows.

A rank's part of such a tensor is many short byte ranges, each with a checksum of its own in the manifest. The ranks of
one data position hold neighbouring parts of the same rows, so they swap elements, a few MiB at a time, and each then
has a long range. The bytes of the file are the same; only who writes them differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.format.local_tensor import Piece, bytes_of, copy_runs, held_in
from shardwise.checkpoint.format.tensor_files import TensorFiles
from shardwise.checkpoint.names.index_map import IndexMap, Ints, Place
from shardwise.checkpoint.ranks.consensus import Peers
from shardwise.comm.all_to_all import AllToAllPart, all_to_all
from shardwise.comm.together import OverGroups
from shardwise.fsdp.collectives import Buffer, BufferKind, Collectives
from shardwise.fsdp.sharded_parameter import Part
from shardwise.layout.ranges import Range

_SHORT_BYTES = 256 * 2**10
"""Ranges that are shorter on average are exchanged: they would be written through the page cache, one by one."""
_ROUND_BYTES = 4 * 2**20
"""Bytes of the file that the ranks of an axis exchange at a time, all ranks together."""
_MOST_ITEM_BYTES = 16
"""Bytes of the largest dtype's element."""


class _Held(NamedTuple):
    """Elements `held` of a flattened part of a tensor, which a rank is to write."""

    part: Part
    held: Range


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """A piece whose elements at one place are exchanged, and what each rank of the axis holds of it."""

    piece: Piece
    place: Place
    by_rank: Sequence[_Held]

    @property
    def axis(self) -> Collectives:
        return self.piece.axes[0]

    @property
    def runs(self) -> list[IndexMap]:
        """By rank, the map from elements of the stored tensor to those that the rank holds."""
        return [held_in(part, self.piece.shape, held, self.place) for part, held in self.by_rank]

    @property
    def is_short(self) -> bool:
        """Whether the elements lie in short ranges of the file. The same on each rank of the axis."""
        runs = self.runs
        count, numel = sum(map(len, runs)), sum(each.numel for each in runs)
        return count > len(runs) and numel * self.piece.tensor.itemsize < count * _SHORT_BYTES


class _Rows(NamedTuple):
    """Neighbouring elements of a stored tensor."""

    start: int
    values: Tensor
    """1-D, valid until the next ones are asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class _Rounds:
    """How the elements of a cut are exchanged, a few of every rank's share at a time."""

    starts: Ints
    """(rounds, ranks): where in the stored tensor what a rank gets in a round begins."""
    stops: Ints
    counts: Ints
    """(rounds, ranks, ranks): elements from each source to each target."""
    span: int
    """The most elements that a rank gets in a round."""

    @classmethod
    def of(cls, runs: Sequence[IndexMap], item_bytes: int) -> _Rounds:
        """runs: by rank, as `_Cut.runs`."""
        shares = _shares(runs)
        span = max(1, _ROUND_BYTES // len(runs) // item_bytes)
        rounds = -(-int(np.diff(shares).max()) // span)
        starts = np.minimum(shares[:-1] + np.arange(rounds)[:, None] * span, shares[1:])
        stops = np.minimum(starts + span, shares[1:])
        counts = np.stack([_below(each, stops) - _below(each, starts) for each in runs], axis=1)
        return cls(starts, stops, counts, span)


class _Room(NamedTuple):
    """Memory for the rounds along one axis."""

    outgoing: Buffer
    incoming: Tensor
    """1-D, uint8, as `window`: the rows that it gets, once they are in order."""
    window: Tensor


class RowExchange:
    """The exchanges of one save, in the order of the files. A context manager: a rank that leaves it early, because it
    failed, takes part in the rest, so that no other waits for it. What may fail on one rank alone is done while ranks
    go on together, or, within a round, put off until the last one: the rank sends anything in the rounds that follow,
    which needs no memory, and raises at the end of the block, or where it asks for rows."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._cuts: list[tuple[_Cut, _Rounds]] = []
        self._rooms: dict[Collectives, _Room] = {}
        self._failure: Exception | None = None
        self._stream = self._all()

    def __enter__(self) -> Self:
        """Allocate the memory for all exchanges. Every rank must call this, after all is arranged."""
        for axis in self._peers.axes:
            with self._peers.together():
                if any(cut.axis is axis for cut, _ in self._cuts):
                    share = max(_ROUND_BYTES // axis.world_size, _MOST_ITEM_BYTES)
                    outgoing = axis.allocate(share * axis.world_size, BufferKind.REDUCE)
                    incoming, window = (torch.empty(share, dtype=torch.uint8, device=axis.device) for _ in range(2))
                    self._rooms[axis] = _Room(outgoing, incoming, window)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._finish()
        else:
            with suppress(Exception):  # what ended the block is what is raised
                self._finish()

    def _finish(self) -> None:
        for _ in self._stream:
            pass
        while self._rooms:
            axis, room = self._rooms.popitem()
            axis.drop(room.outgoing)
        if self._failure is not None:
            raise self._failure

    def arrange(self, files: TensorFiles, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces to write in place of `pieces`, which are those of one file set. Every rank must call this.
        The ranks of an axis pass pieces of the same tensors that are cut along it, empty ones included."""
        if not self._peers.axes:
            return list(pieces)
        along: dict[Collectives, list[Piece]] = {}
        for piece in pieces:
            if type(piece) is Piece and len(piece.axes) == 1:
                along.setdefault(piece.axes[0], []).append(piece)
        cuts: list[tuple[Piece, list[_Cut]]] = []
        for axis, members in along.items():
            own = [_Held(piece.within, piece.held) for piece in members if piece.within is not None]
            everyone = OverGroups((axis,)).all_gather_object(own)
            cuts += [
                (piece, [_Cut(piece, place, by_rank) for place in piece.places])
                for piece, by_rank in zip(members, zip(*everyone, strict=True), strict=True)
            ]
        with self._peers.together():
            return self._arranged(files, pieces, cuts)

    def _arranged(
        self, files: TensorFiles, pieces: Sequence[Piece], cuts: Sequence[tuple[Piece, list[_Cut]]]
    ) -> list[Piece]:
        found: dict[str, list[_Cut]] = {}
        moved: set[int] = set()
        for piece, of_piece in cuts:
            if any(each.is_short for each in of_piece):
                moved.add(id(piece))
                for each in of_piece:
                    found.setdefault(each.place.name, []).append(each)
        arranged = [piece for piece in pieces if id(piece) not in moved]
        for layout in files.files.values():
            for each in (each for name in layout.tensors for each in found.get(name, ())):
                runs = each.runs
                self._cuts.append((each, _Rounds.of(runs, each.piece.tensor.itemsize)))
                rows = _covered(runs, *_shares(runs)[each.axis.rank : each.axis.rank + 2].tolist())
                if len(rows):
                    arranged.append(_row_piece(each, rows, self, len(self._cuts) - 1))
        return arranged

    def rows(self, number: int) -> Iterator[_Rows]:
        """Yield this rank's rows of one cut; those of earlier ones must have been taken. Raises what has failed."""
        for at, rows in self._stream:  # not closed with this generator: it goes on where this one ends
            if self._failure is not None:
                raise self._failure
            if at == number and rows is not None:
                yield rows
            elif at == number:
                return
            else:
                assert rows is None, "rows are taken in the order of the files"

    def _all(self) -> Iterator[tuple[int, _Rows | None]]:
        """Yield all rows of all cuts, and None after the last ones of each."""
        for number, (cut, rounds) in enumerate(self._cuts):
            for rows in self._rows_of(cut, rounds):
                yield number, rows
            yield number, None

    @contextmanager
    def _putting_off(self) -> Iterator[None]:
        """A context that exits also if the block fails; the first failure is kept."""
        try:
            yield
        except Exception as error:
            self._failure = self._failure or error

    @torch.no_grad()
    def _rows_of(self, cut: _Cut, rounds: _Rounds) -> Iterator[_Rows]:
        axis, own, room = cut.axis, cut.piece.tensor, self._rooms[cut.axis]
        me, item_bytes = axis.rank, own.itemsize
        runs: list[IndexMap] = []
        with self._putting_off():
            runs = cut.runs
        window = room.window[: rounds.span * item_bytes].view(own.dtype)
        for begins, ends, counts in zip(rounds.starts, rounds.stops, rounds.counts, strict=True):
            start, stop = int(begins[me]), int(ends[me])
            axis.claim(room.outgoing)
            with self._putting_off():
                if self._failure is None:
                    ours = [runs[me].within(int(low), int(high)) for low, high in zip(begins, ends, strict=True)]
                    values = [_values(own, each) for each in ours]
                    _put(room.outgoing, [each for target, each in enumerate(values) if target != me])
            incoming = _exchanged(axis, counts * item_bytes, room)
            found: list[_Rows] = []
            with self._putting_off():
                if self._failure is None:
                    arriving = counts[:, me].copy()
                    arriving[me] = 0
                    arrived = list(incoming.view(own.dtype).split(arriving.tolist()))
                    arrived[me] = values[me]
                    for part, each in zip(arrived, runs, strict=True):
                        inside = each.within(start, stop)
                        firsts = np.cumsum(inside.length) - inside.length
                        copy_runs(part, window, IndexMap(firsts, inside.here - start, inside.length))
                    covered = _covered(runs, start, stop).inverse().tuples()
                    found = [_Rows(low, window[low - start : low - start + length]) for low, _, length in covered]
            yield from found


def _put(buffer: Buffer, values: Sequence[Tensor]) -> None:
    """Write values into a buffer, one after another."""
    at = 0
    for each in values:
        buffer.bytes[at : at + each.nbytes].view(each.dtype).copy_(each)
        at += each.nbytes


def _exchanged(axis: Collectives, nbytes: Ints, room: _Room) -> Tensor:
    """Send each rank what is for it and return what arrives from the others, by rank: uint8.

    nbytes: from each source to each target.
    """
    parts = tuple(
        AllToAllPart(source, target, sent)
        for source, targets in enumerate(nbytes.tolist())
        for target, sent in enumerate(targets)
        if source != target and sent
    )
    incoming = room.incoming[: sum(part.nbytes for part in parts if part.target == axis.rank)]
    if parts:
        all_to_all(axis, room.outgoing, parts, incoming).wait()
    return incoming


@dataclass(slots=True, eq=False)
class RowPiece(Piece):
    """Rows that are there only after an exchange: `tensor` has their number of elements, but no memory for them."""

    exchange: RowExchange = field(kw_only=True)
    number: int = field(kw_only=True)

    def chunks(self, runs: IndexMap) -> Iterator[tuple[int, memoryview]]:
        """See `WritablePiece`. The memory is valid until the next chunk is asked for."""
        for start, values in self.exchange.rows(self.number):
            yield start, bytes_of(values.cpu())

    def copy_to(self, memory: Tensor) -> None:
        """See `Piece`. Every rank of the axis must call this."""
        at = 0
        for _, values in self.exchange.rows(self.number):
            memory[at : at + values.numel()].copy_(values, non_blocking=True)
            at += values.numel()


def _row_piece(cut: _Cut, rows: IndexMap, exchange: RowExchange, number: int) -> RowPiece:
    """Return the piece that stands for `rows`: from its elements to those of the stored tensor."""
    like = torch.empty(1, dtype=cut.piece.tensor.dtype, device=cut.axis.device).expand(rows.numel)
    place = Place(cut.place.name, cut.place.shape, rows)
    return RowPiece(cut.piece.names, cut.piece.shape, like, 0, False, (place,), exchange=exchange, number=number)


def _shares(runs: Sequence[IndexMap]) -> Ints:
    """Return where in the stored tensor the share of each rank begins, and where the last one ends."""
    held = [each for each in runs if len(each)]
    start = min((int(each.here[0]) for each in held), default=0)
    stop = max((int(each.here[-1] + each.length[-1]) for each in held), default=0)
    return start + (stop - start) * np.arange(len(runs) + 1, dtype=np.int64) // len(runs)


def _below(runs: IndexMap, at: Ints) -> Ints:
    """Return how many of the elements that `runs` maps come before each of the elements `at`."""
    if not len(runs):
        return np.zeros_like(at)
    begun = np.maximum(np.searchsorted(runs.here, at, "right") - 1, 0)
    below: Ints = (np.cumsum(runs.length) - runs.length)[begun] + np.clip(at - runs.here[begun], 0, runs.length[begun])
    return below


def _covered(runs: Sequence[IndexMap], start: int, stop: int) -> IndexMap:
    """Return the elements of [start, stop) that some rank holds, as the map to them from their numbers in order."""
    inside = [each.within(start, stop) for each in runs]
    if sum(each.numel for each in inside) == stop - start:
        return IndexMap.one(stop - start, there=start)
    union = IndexMap.joined([IndexMap(each.here, each.here, each.length) for each in inside])
    return IndexMap(np.cumsum(union.length) - union.length, union.here, union.length)


def _values(own: Tensor, runs: IndexMap) -> Tensor:
    """Return the elements of `own` that `runs` leads to, in order: a view of them if they lie together."""
    if not len(runs):
        return own[:0]
    if (runs.there[1:] == (runs.there + runs.length)[:-1]).all():
        return own[int(runs.there[0]) : int(runs.there[-1] + runs.length[-1])]
    return own[torch.from_numpy(runs.elements()).to(own.device)]

"""Rows of sources that are larger than memory, made block by block while a run goes on.

Every epoch visits the blocks of a source in a seeded order, and the rows of each block in one of their own. Like the
order of rows in memory, none of it depends on ranks. Each rank has the block that it draws from and, made meanwhile by
a thread, the next one. A source of one block is drawn from as rows in memory are, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Thread
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardwise.errors import ConfigError
from shardwise.train.data.micro_batch import Draw, MicroBatch, Rows
from shardwise.train.data.order import Pattern, Position, check_seed, permutation

_BLOCKS = 2**32 - 1
"""The last part of the key of the order of blocks; orders of rows have a block's number there."""


class BlockRows(Rows, Protocol):
    """Rows of a block, of which single ones can be put beside others."""

    @classmethod
    def picked(cls, picks: Sequence[tuple[Self, int]]) -> Self:
        """Return rows of several others, at least one, by their indices."""


R = TypeVar("R", bound=BlockRows)


class Cursor(NamedTuple):
    """A place in a source: before a row of a block."""

    epoch: int = 0
    place: int = 0
    """The block's, in the epoch's order."""
    row: int = 0
    """Rows of the block that are before this place; perhaps all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Source(Generic[R]):
    """One source of a stream."""

    blocks: int
    layout: str
    """A short text that identifies where blocks begin (`Blocks.digest`)."""
    weight: float
    load: Callable[[int], R]
    """Returns the rows of a block, perhaps none; of block 0 at least one."""
    first: list[R]
    """The rows of block 0, until they are drawn."""

    def rows(self, block: int) -> R:
        """Return the rows of a block."""
        kept = [*self.first]
        self.first.clear()
        return kept[0] if kept and not block else self.load(block)

    def block(self, seed: int, epoch: int, place: int) -> int:
        """Return the block at a place of an epoch's order. The first epoch begins with block 0, whose rows are there
        when a run starts."""
        order = permutation(self.blocks, seed, epoch, _BLOCKS)
        if not epoch:
            order = np.concatenate([[0], order[order != 0]])
        return int(order[place])


@dataclass(frozen=True, slots=True, eq=False)
class Stream(Generic[R]):
    """The rows to train on of one or several sources. Several are drawn from by their weights."""

    sources: tuple[Source[R], ...]
    digest: str
    """A short text that identifies the data by where its blocks begin and the rows of each source's first one."""

    @classmethod
    def of(cls, sources: Sequence[Source[R]]) -> Self:
        """Return the stream of sources whose first blocks are there."""
        parts = [f"{source.layout} {source.first[0].digest} {source.weight!r}" for source in sources]
        return cls(tuple(sources), xxhash.xxh3_64_hexdigest(str(parts).encode()))


@dataclass(slots=True, eq=False)
class _Block(Generic[R]):
    """A block that rows are drawn from."""

    rows: R
    cursor: Cursor
    """Its beginning."""
    first: int
    """Samples of the source before it."""
    order: NDArray[np.int64]

    @property
    def end(self) -> int:
        """Samples of the source up to its end."""
        return self.first + len(self.order)


@dataclass(slots=True, eq=False)
class _Reader(Generic[R]):
    """Goes through a source's blocks, from a cursor on."""

    source: Source[R]
    seed: int
    start: Cursor
    drawn: int
    """Samples of the source before `start`."""
    block: _Block[R] | None = None
    ahead: Future[R] | None = field(default=None, init=False)
    """The rows of the block after `block`."""

    def row(self, sample: int) -> tuple[R, int]:
        """Return the rows among which a sample is, and its place there. Samples must not decrease."""
        block = self._upto(sample + 1)
        return block.rows, int(block.order[sample - block.first])

    def cursor(self, sample: int) -> Cursor:
        """Return the cursor before a sample that is not before one that was drawn."""
        if sample == self.drawn:
            return self.start
        block = self._upto(sample)
        return block.cursor._replace(row=sample - block.first)

    def _upto(self, sample: int) -> _Block[R]:
        """Return the block in which the sample before this one is."""
        block = self.block
        if block is None:
            begin = self.start._replace(row=0)
            block = self._entered(begin, self.drawn - self.start.row, self._load(begin))
        while sample > block.end:
            assert self.ahead is not None
            block = self._entered(self._after(block.cursor), block.end, self.ahead.result())
        return block

    def _entered(self, cursor: Cursor, first: int, rows: R) -> _Block[R]:
        """Return a block, from which is drawn from now on, and begin to make the next one."""
        number = self._number(cursor)
        order = permutation(len(rows), self.seed, cursor.epoch, number)
        self.block = _Block(rows, cursor, first, order)
        after = self._after(cursor)
        self.ahead = Future()
        if self._number(after) == number:  # the only block
            self.ahead.set_result(rows)
        else:
            Thread(target=_fulfil, args=(self.ahead, lambda: self._load(after)), daemon=True).start()
        return self.block

    def _after(self, cursor: Cursor) -> Cursor:
        ends = cursor.place + 1 == self.source.blocks
        return Cursor(cursor.epoch + 1) if ends else Cursor(cursor.epoch, cursor.place + 1)

    def _number(self, cursor: Cursor) -> int:
        return self.source.block(self.seed, cursor.epoch, cursor.place)

    def _load(self, cursor: Cursor) -> R:
        return self.source.rows(self._number(cursor))


def _fulfil(future: Future[R], load: Callable[[], R]) -> None:
    try:
        future.set_result(load())
    except BaseException as error:
        future.set_exception(error)


class StreamSamples(Generic[R]):
    """The samples of a stream from a position on, drawn in order."""

    def __init__(self, stream: Stream[R], seed: int, start: Position | None) -> None:
        """
        Args:
            seed: of the order.
            start: None = the beginning.

        Raises:
            ConfigError: the position belongs to another seed, or to other data; the message names both sides.
        """
        self.first = 0 if start is None else start.sample
        self._seed, self._digest = seed, stream.digest
        self._pattern = Pattern([source.weight for source in stream.sources], seed) if stream.sources[1:] else None
        cursors = [Cursor() for _ in stream.sources]
        if start is not None:
            cursors = _cursors(start, seed, stream.digest)
        self._readers = [
            _Reader(source, seed, cursor, self._drawn(part, self.first))
            for part, (source, cursor) in enumerate(zip(stream.sources, cursors, strict=True))
        ]

    def position(self, sample: int) -> Position:
        """Return the position before a sample is drawn; none after it may have been."""
        cursors = [list(reader.cursor(self._drawn(part, sample))) for part, reader in enumerate(self._readers)]
        return Position(self._seed, 0, sample, digest=self._digest, cursors=cursors)

    def micro_batch(self, samples: Sequence[int]) -> MicroBatch:
        """Return the rows of some samples, at least one, in ascending order from one call to the next.

        Raises:
            ConfigError: a row cannot be used; the message names it.
        """
        picks = []
        for sample in samples:
            part, drawn = (0, sample) if self._pattern is None else self._pattern.part(sample)
            picks.append(self._readers[part].row(drawn))
        together = type(picks[0][0]).picked(picks)
        return together.micro_batch([Draw(row, sample) for row, sample in enumerate(samples)])

    def _drawn(self, part: int, sample: int) -> int:
        return sample if self._pattern is None else self._pattern.drawn(part, sample)


def _cursors(position: Position, seed: int, digest: str) -> list[Cursor]:
    check_seed(position, seed)
    if position.cursors is None:
        raise ConfigError("data.streaming was false and is now true")
    if position.digest != digest:
        raise ConfigError(
            f"the checkpoint's data, cut into blocks of data.block_mib, had the digest {position.digest}, the data now "
            f"has {digest}"
        )
    return [Cursor(*cursor) for cursor in position.cursors]

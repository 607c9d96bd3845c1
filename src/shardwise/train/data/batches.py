"""From `[data]` to batches: rows of tokens, and each rank's share of them at every step.

Every rank reads, tokenizes and packs the whole source: once, in memory (12 MB of text take about a second), or with
`data.streaming` block by block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import xxhash

from shardwise.errors import ConfigError
from shardwise.train.config.schema import DataConfig, SourceConfig
from shardwise.train.data.blocks import Blocks
from shardwise.train.data.documents import Document
from shardwise.train.data.encoding import EncodedDocument, encode_document, is_in_plain_template
from shardwise.train.data.holdout import Split, hold_out
from shardwise.train.data.micro_batch import Draw, MicroBatch, Rows
from shardwise.train.data.order import Mixture, Order, Position
from shardwise.train.data.packing import PackedRows, joined, pack
from shardwise.train.data.rows import document_of_row
from shardwise.train.data.sources import read_documents, stretches
from shardwise.train.data.streaming import Source, Stream, StreamSamples
from shardwise.train.data.tokenizer import Tokenizer, load_tokenizer


class Datasets(NamedTuple):
    """The rows of a source, read and packed."""

    train: PackedRows | Stream[PackedRows]
    held_out: PackedRows
    tokenizer: Tokenizer
    sample: PackedRows
    """One row: held out, if there are any."""
    learnt: float
    """Share of the tokens to train on that are targets."""
    truncated: int
    """Number of examples to train on that were longer than a row and lost their end."""

    @classmethod
    def of(
        cls, train: PackedRows | Stream[PackedRows], first: PackedRows, held_out: PackedRows, tokenizer: Tokenizer
    ) -> Self:
        """first: the rows to train on, or their first block, which the figures are then of. At least one."""
        sample = PackedRows.picked([(held_out if len(held_out) else first, 0)])
        learnt = first.target_tokens / (len(first) * (first.ids.shape[1] - 1))
        return cls(train, held_out, tokenizer, sample, learnt, first.truncated)

    def __str__(self) -> str:
        """Describe the data in words that are equal if and only if the data is."""
        ids = f"{self.tokenizer.vocab_size} token ids, of which {self.tokenizer.end_id} ends a document"
        digest = xxhash.xxh3_64_hexdigest(f"{self.train.digest} {self.held_out.digest}".encode())
        return f"{self.size} to train on and {len(self.held_out):,} sequences held out (digest {digest}), of {ids}"

    @property
    def size(self) -> str:
        """The amount of data to train on, in words."""
        if isinstance(self.train, PackedRows):
            return f"{len(self.train):,} sequences"
        blocks = sum(source.blocks for source in self.train.sources)
        return "1 block" if blocks == 1 else f"{blocks:,} blocks"


def load_datasets(config: DataConfig) -> Datasets:
    """Read the source that a configuration names; of a stream the first block. Not collective: every rank should get
    the same rows, which `rank_consistency.check` compares.

    Raises:
        ConfigError: the source or the tokenizer is missing or unusable, or the source is too short to train on.
        HubError: the source is a data set of a hub that cannot be fetched.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    if config.streaming:
        return _streamed(config, tokenizer)
    parts = []
    for one in config.each_source:
        documents = read_documents(one.source, one.format, one.subset, one.split)
        parts.append(_packed(documents, one, config, tokenizer))
    weights = [one.weight for one in config.each_source]
    train, held_out = (joined(rows, weights) for rows in zip(*parts, strict=True))
    return Datasets.of(train, train, held_out, tokenizer)


def _streamed(config: DataConfig, tokenizer: Tokenizer) -> Datasets:
    """Return the data block by block. Rows are held out of the first block of each source. Raises as
    `load_datasets`."""
    sources, held_out = [], []
    for one in config.each_source:
        found = stretches(one.source, one.format, one.subset, one.split)
        blocks = Blocks(one.source, found, config.block_mib * 2**20)
        load = partial(_block, blocks, one, config, tokenizer)
        train, out = load(0)
        sources.append(Source(len(blocks), blocks.digest, one.weight, partial(_trained_on, load), [train]))
        held_out.append(out)
    first = sources[0].first[0]
    return Datasets.of(Stream.of(sources), first, joined(held_out, [1] * len(held_out)), tokenizer)


def _trained_on(load: Callable[[int], tuple[PackedRows, PackedRows]], number: int) -> PackedRows:
    return load(number)[0]


def _block(
    blocks: Blocks, source: SourceConfig, config: DataConfig, tokenizer: Tokenizer, number: int
) -> tuple[PackedRows, PackedRows]:
    """Return the rows of a block: to train on, and held out, which are all of the first block."""
    documents = (document_of_row(key, row) for key, row in blocks.rows(number))
    there = (document for document in documents if document is not None)
    if number:
        return _rows(there, config, tokenizer), _rows((), config, tokenizer)
    return _packed([*there], source, config, tokenizer)


def _packed(
    documents: Sequence[Document], source: SourceConfig, config: DataConfig, tokenizer: Tokenizer
) -> tuple[PackedRows, PackedRows]:
    """Return the rows of documents: to train on, and held out. Raises as `load_datasets`."""
    parts = hold_out(documents, config.eval_fraction) if documents else Split([], [])
    train, held_out = (_rows(part, config, tokenizer) for part in parts)
    if not len(train):
        where = " in the first block of its stream" if config.streaming else ""
        raise ConfigError(
            f"data.source={source.source!r} has no token to learn in rows of seq_len={config.seq_len}{where}"
        )
    return train, held_out


def _rows(documents: Iterable[Document], config: DataConfig, tokenizer: Tokenizer) -> PackedRows:
    def encoded() -> Iterator[EncodedDocument]:
        for document in documents:
            tokenizer.renders_plainly |= is_in_plain_template(document, tokenizer)
            yield encode_document(document, tokenizer)

    return pack(encoded(), config.seq_len, tokenizer.end_id, config.document_mask)


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's part of a global batch: the rows `rank::world_size`, in micro-batches of `micro_batch` rows."""

    rank: int
    world_size: int
    micro_batch: int


class Batches:
    """Global batches in a seeded order, and this rank's share of each."""

    def __init__(
        self, rows: Rows | Stream[Any], share: Share, global_batch: int, seed: int, start: Position | None = None
    ) -> None:
        """
        Args:
            rows: all rows to train on, at least one; or a stream of them, of which steps are to be taken in order.
            share: this rank's part.
            global_batch: rows in a step over all ranks; a multiple of micro_batch x world_size.
            seed: seed of the order.
            start: where step 0 of these batches begins; None = the first row of the first epoch. A resumed run passes
                the position that it had reached, whatever its world size and batch are now.

        Raises:
            ConfigError: `global_batch` does not fit, or `start` is not a position in these rows.
        """
        if global_batch % (share.micro_batch * share.world_size):
            raise ConfigError(
                f"train.global_batch={global_batch} is not a multiple of micro_batch x ranks = "
                f"{share.micro_batch} x {share.world_size}"
            )
        self._share = share
        self._global_batch = global_batch
        self._samples: RowSamples | StreamSamples[Any] = (
            StreamSamples(rows, seed, start) if isinstance(rows, Stream) else RowSamples(rows, seed, start)
        )

    def position(self, step: int) -> Position:
        """Return the position in the data before step `step`, which is counted from `start`."""
        return self._samples.position(self._samples.first + step * self._global_batch)

    def batch(self, step: int) -> tuple[MicroBatch, ...]:
        """Return this rank's micro-batches of a step. Every rank gets the same number."""
        first = self._samples.first + step * self._global_batch
        own = range(first, first + self._global_batch)[self._share.rank :: self._share.world_size]
        size = self._share.micro_batch
        return tuple(self._samples.micro_batch(own[at : at + size]) for at in range(0, len(own), size))


class RowSamples:
    """The samples of rows that are all in memory, from a position on."""

    def __init__(self, rows: Rows, seed: int, start: Position | None) -> None:
        """Arguments and errors as for `Batches`."""
        self._rows = rows
        self._order = (
            Mixture([part.rows for part in rows.parts], [part.weight for part in rows.parts], seed, rows.digest)
            if rows.parts
            else Order(len(rows), seed, rows.digest)
        )
        self.first = 0 if start is None else self._order.sample(start)

    def position(self, sample: int) -> Position:
        """Return the position before a sample is drawn."""
        return self._order.position(sample)

    def micro_batch(self, samples: Sequence[int]) -> MicroBatch:
        """Return the rows of some samples, at least one."""
        return self._rows.micro_batch([Draw(self._order.row(sample), sample) for sample in samples])


@dataclass(frozen=True, slots=True)
class EvaluationBatches:
    """This rank's share of all rows, each row once, in order. Batches are made while they are iterated over.

    Every rank gets the same number of full micro-batches, because a sharded model's forward is collective. They are
    filled up with copies of row 0 whose labels are all masked.
    """

    rows: Rows
    share: Share

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / (self.share.micro_batch * self.share.world_size))

    def __iter__(self) -> Iterator[MicroBatch]:
        size, world_size = self.share.micro_batch, self.share.world_size
        for first in range(0, len(self) * size * world_size, size * world_size):
            rows = range(first + self.share.rank, first + size * world_size, world_size)
            yield self.rows.micro_batch([Draw(row, row) for row in rows])

"""From `[data]` to batches: rows of tokens, and each rank's share of them at every step.

Every rank reads, tokenizes and packs the whole source once, in memory; 12 MB of text take about a second. A source
larger than a rank's memory is not supported yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from shardwise.errors import ConfigError
from shardwise.train.config.schema import DataConfig, SourceConfig
from shardwise.train.data.encoding import encode_document, is_in_plain_template
from shardwise.train.data.holdout import hold_out
from shardwise.train.data.micro_batch import Draw, MicroBatch, Rows
from shardwise.train.data.order import Mixture, Order, Position
from shardwise.train.data.packing import PackedRows, joined, pack
from shardwise.train.data.sources import read_documents
from shardwise.train.data.tokenizer import Tokenizer, load_tokenizer


class Datasets(NamedTuple):
    """The rows of a source, read and packed."""

    train: PackedRows
    held_out: PackedRows
    tokenizer: Tokenizer

    def __str__(self) -> str:
        """Describe the data in words that are equal if and only if the data is."""
        ids = f"{self.tokenizer.vocab_size} token ids, of which {self.tokenizer.end_id} ends a document"
        digest = xxhash.xxh3_64_hexdigest(f"{self.train.digest} {self.held_out.digest}".encode())
        return f"{len(self.train):,} rows to train on and {len(self.held_out):,} held out (digest {digest}), of {ids}"


def load_datasets(config: DataConfig) -> Datasets:
    """Read the source that a configuration names. Not collective: every rank should get the same rows, which
    `rank_consistency.check` compares.

    Raises:
        ConfigError: the source or the tokenizer is missing or unusable, or the source is too short to train on.
        HubError: the source is a data set of a hub that cannot be fetched.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    sources = config.each_source
    parts = [_packed(source, config, tokenizer) for source in sources]
    weights = [source.weight for source in sources]
    train, held_out = (joined(rows, weights) for rows in zip(*parts, strict=True))
    return Datasets(train, held_out, tokenizer)


def _packed(source: SourceConfig, config: DataConfig, tokenizer: Tokenizer) -> tuple[PackedRows, PackedRows]:
    """Return the rows of one source: to train on, and held out. Raises as `load_datasets`."""
    documents = read_documents(source.source, source.format, source.subset, source.split)
    tokenizer.renders_plainly |= any(is_in_plain_template(document, tokenizer) for document in documents)
    train, held_out = (
        pack(
            (encode_document(document, tokenizer) for document in part),
            config.seq_len,
            tokenizer.end_id,
            config.document_mask,
        )
        for part in hold_out(documents, config.eval_fraction)
    )
    if not len(train):
        raise ConfigError(f"data.source={source.source!r} has no token to learn in rows of seq_len={config.seq_len}")
    return train, held_out


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's part of a global batch: the rows `rank::world_size`, in micro-batches of `micro_batch` rows."""

    rank: int
    world_size: int
    micro_batch: int


class Batches:
    """Global batches in a seeded order, and this rank's share of each."""

    def __init__(self, rows: Rows, share: Share, global_batch: int, seed: int, start: Position | None = None) -> None:
        """
        Args:
            rows: all rows to train on; at least one.
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
        self._rows = rows
        self._share = share
        self._global_batch = global_batch
        parts = rows.parts if isinstance(rows, PackedRows) else ()
        self._order = (
            Mixture([part.rows for part in parts], [part.weight for part in parts], seed, rows.digest)
            if parts
            else Order(len(rows), seed, rows.digest)
        )
        self._first_sample = 0 if start is None else self._order.sample(start)

    def position(self, step: int) -> Position:
        """Return the position in the data before step `step`, which is counted from `start`."""
        return self._order.position(self._first_sample + step * self._global_batch)

    def global_rows(self, step: int) -> list[int]:
        """Return the row indices of a step over all ranks, in order. The same at every world size."""
        first = self._first_sample + step * self._global_batch
        return [self._order.row(sample) for sample in range(first, first + self._global_batch)]

    def batch(self, step: int) -> tuple[MicroBatch, ...]:
        """Return this rank's micro-batches of a step. Every rank gets the same number."""
        first = self._first_sample + step * self._global_batch
        draws = [Draw(row, sample) for sample, row in enumerate(self.global_rows(step), first)]
        own, size = draws[self._share.rank :: self._share.world_size], self._share.micro_batch
        return tuple(self._rows.micro_batch(own[at : at + size]) for at in range(0, len(own), size))


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

"""From `[data]` to batches: rows of tokens, and each rank's share of them at every step.

The source is read, tokenized and packed once, in memory, on every rank: 12 MB of text take about a second. A source
that does not fit in a rank's memory does not fit here yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardwise.errors import ConfigError
from shardwise.train.config.schema import DataConfig
from shardwise.train.data.encoding import encode_document, is_in_plain_template
from shardwise.train.data.holdout import hold_out
from shardwise.train.data.order import Order, Position
from shardwise.train.data.packing import PackedRows, pack
from shardwise.train.data.sources import read_documents
from shardwise.train.data.tokenizer import Tokenizer, load_tokenizer

IGNORED = -100
"""The label of a token that is no target, in torch's cross entropy and in transformers."""


class MicroBatch(NamedTuple):
    """The rows of one forward, local to a rank."""

    input_ids: NDArray[np.int64]
    """[micro_batch, seq_len]."""
    labels: NDArray[np.int64]
    """[micro_batch, seq_len]: `input_ids` where a token is a target, else -100. Not shifted: the loss does."""

    @property
    def target_tokens(self) -> int:
        """Targets of the loss, whose first column is never predicted."""
        return int((self.labels[:, 1:] != IGNORED).sum())


class Datasets(NamedTuple):
    """A source, read and packed."""

    train: PackedRows
    held_out: PackedRows
    tokenizer: Tokenizer
    in_plain_template: bool = False
    """Whether conversations are written in the built-in template."""

    def __str__(self) -> str:
        """In words that are the same where the data is."""
        ids = f"{self.tokenizer.vocab_size} token ids of which {self.tokenizer.end_id} ends a document"
        digest = xxhash.xxh3_64_hexdigest(f"{self.train.digest} {self.held_out.digest}".encode())
        return f"{len(self.train):,} rows to train on and {len(self.held_out):,} held out (digest {digest}), of {ids}"


def load_datasets(config: DataConfig) -> Datasets:
    """Read the source that a configuration names. Not collective: every rank should get the same rows, and
    `rank_consistency.check` compares them.

    Raises:
        ConfigError: the source or tokenizer is missing or not what it should be, or too short to train on.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    split = hold_out(read_documents(config.source, config.format), config.eval_fraction)
    train, held_out = (
        pack((encode_document(document, tokenizer) for document in part), config.seq_len, tokenizer.end_id)
        for part in split
    )
    if not len(train):
        raise ConfigError(f"data.source={config.source!r} has no token to learn in rows of seq_len={config.seq_len}")
    plain = any(is_in_plain_template(document, tokenizer) for part in split for document in part)
    return Datasets(train, held_out, tokenizer, plain)


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of a global batch is this rank's: its rows `rank::world_size`, in forwards of `micro_batch` rows."""

    rank: int
    world_size: int
    micro_batch: int


class Batches:
    """Global batches in a seeded order, and this rank's share of each."""

    def __init__(
        self, rows: PackedRows, share: Share, global_batch: int, seed: int, start: Position | None = None
    ) -> None:
        """
        Args:
            rows: everything there is to train on; at least one row.
            share: this rank's part.
            global_batch: rows in a step over all ranks; a multiple of micro_batch x world_size.
            seed: decides the order.
            start: where step 0 of these batches begins; None = the first row of the first epoch. A run that resumes,
                at whatever world size and batch, passes the position it had reached.

        Raises:
            ConfigError: `global_batch` does not fit, or `start` is no place in these rows.
        """
        if global_batch % (share.micro_batch * share.world_size):
            raise ConfigError(
                f"train.global_batch={global_batch} is not a multiple of micro_batch x ranks = "
                f"{share.micro_batch} x {share.world_size}"
            )
        self._rows = rows
        self._share = share
        self._global_batch = global_batch
        self._order = Order(len(rows), seed, rows.digest)
        self._first_sample = 0 if start is None else self._order.sample(start)

    def position(self, step: int) -> Position:
        """The place in the data before step `step` (counted from `start`)."""
        return self._order.position(self._first_sample + step * self._global_batch)

    def global_rows(self, step: int) -> list[int]:
        """The rows of the whole step, over all ranks, in order. The same at every world size."""
        first = self._first_sample + step * self._global_batch
        return [self._order.row(sample) for sample in range(first, first + self._global_batch)]

    def batch(self, step: int) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches of a step. Every rank gets equally many."""
        return _micro_batches(self._rows, self.global_rows(step), self._share)


def evaluation_batches(rows: PackedRows, share: Share) -> tuple[MicroBatch, ...]:
    """This rank's share of all `rows`, once each, in order.

    Every rank gets equally many micro-batches of full size, because a forward of a sharded model is collective: the
    last ones repeat row 0 with all labels masked.
    """
    one_pass = share.micro_batch * share.world_size
    padded = -(-len(rows) // one_pass) * one_pass
    return _micro_batches(rows, range(padded), share)


def _micro_batches(rows: PackedRows, indices: Sequence[int], share: Share) -> tuple[MicroBatch, ...]:
    """One rank's share of rows by index, in forwards."""
    own = indices[share.rank :: share.world_size]
    return tuple(
        _micro_batch(rows, own[first : first + share.micro_batch]) for first in range(0, len(own), share.micro_batch)
    )


def _micro_batch(rows: PackedRows, indices: Sequence[int]) -> MicroBatch:
    """Rows by index; an index past the end is row 0 without targets."""
    exists = np.array([index < len(rows) for index in indices])
    index = [index if there else 0 for index, there in zip(indices, exists, strict=True)]
    input_ids = rows.ids[index].astype(np.int64)
    return MicroBatch(input_ids, np.where(rows.is_target[index] & exists[:, None], input_ids, IGNORED))

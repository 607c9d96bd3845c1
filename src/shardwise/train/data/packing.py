"""From documents to rows of equal length. Deterministic: the same documents give the same rows at any number of ranks.

Policy. Plain text is one stream: documents follow each other, each closed by its end-of-document token, and the
stream is cut every `seq_len` tokens, so a document may continue in the next row. Instruction examples are never split:
each goes into the current row if it fits, else the rest of that row is padded and the example starts the next row; one
that is longer than a row loses its end. Everything stays in the order of the source.

Not targets: prompts, padding, and the first token of every document, because nothing of its own document precedes it.
The first token of a row has nothing before it either, but the loss, which predicts token t+1 from tokens up to t, never
predicts it. With `data.document_mask` batches have `position_ids`, which begin anew with each document, padding
included: by these transformers' models keep documents apart. Without, a position may attend to earlier documents of its
row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardwise.errors import ConfigError
from shardwise.train.data.encoding import EncodedDocument
from shardwise.train.data.micro_batch import IGNORED, Draw, MicroBatch, Part, parts_in_words


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """Rows of tokens, in the order of the source."""

    ids: NDArray[np.int32]
    """[rows, seq_len] token ids; padding is the end-of-document token."""
    is_target: NDArray[np.bool_]
    """[rows, seq_len] whether a token is a target; the first column is never used."""
    truncated: int = 0
    """Number of instruction examples that were longer than a row and lost their end."""
    begins: NDArray[np.bool_] | None = None
    """[rows, seq_len] whether a token is the first of its document in its row; None if documents are not kept apart."""
    parts: tuple[Part, ...] = ()
    """The sources that the rows are from, in order; empty where all rows are drawn alike."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def target_tokens(self) -> int:
        """Number of targets in a loss over all rows."""
        return int(self.is_target[:, 1:].sum())

    @property
    def digest(self) -> str:
        """A short text that identifies the rows: a hash over all of them, computed at each call."""
        state = xxhash.xxh3_64(f"{self.ids.shape}{parts_in_words(self.parts)}".encode())
        for array in (self.ids, self.is_target):
            state.update(np.ascontiguousarray(array).data)
        return state.hexdigest()

    @classmethod
    def picked(cls, picks: Sequence[tuple[Self, int]]) -> Self:
        """Return rows of several others, at least one, by their indices: all of the same length, all with `begins` or
        all without."""
        begins = [rows.begins[row] for rows, row in picks if rows.begins is not None]
        return cls(
            np.stack([rows.ids[row] for rows, row in picks]),
            np.stack([rows.is_target[row] for rows, row in picks]),
            begins=np.stack(begins) if begins else None,
        )

    def micro_batch(self, draws: list[Draw]) -> MicroBatch:
        """Return the rows that were drawn: int64 ids, and as labels the same ids where a token is a target."""
        exists = np.array([draw.row < len(self) for draw in draws])
        index = [draw.row if there else 0 for draw, there in zip(draws, exists, strict=True)]
        input_ids = self.ids[index].astype(np.int64)
        labels = np.where(self.is_target[index] & exists[:, None], input_ids, IGNORED)
        inputs = {"input_ids": input_ids}
        if self.begins is not None:
            places = np.arange(self.ids.shape[1])
            inputs["position_ids"] = places - np.maximum.accumulate(np.where(self.begins[index], places, 0), axis=1)
        return MicroBatch.of_next_tokens(inputs, labels)


def joined(parts: Sequence[PackedRows], weights: Sequence[float]) -> PackedRows:
    """Return the rows of several sources, at least one, one after another; with one source as they are.

    Args:
        parts: of rows of the same length, all with `begins` or all without.
        weights: how often each source is drawn from, relative to the others.
    """
    if len(parts) == 1:
        return parts[0]
    begins = [part.begins for part in parts if part.begins is not None]
    return PackedRows(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.is_target for part in parts]),
        sum(part.truncated for part in parts),
        np.concatenate(begins) if begins else None,
        tuple(Part(len(part), weight) for part, weight in zip(parts, weights, strict=True)),
    )


class _Packer:
    """Fills one row after another."""

    def __init__(self, seq_len: int, pad_id: int) -> None:
        self.seq_len = seq_len
        self.pad_id = pad_id
        self.ids: list[NDArray[np.int32]] = []
        self.targets: list[NDArray[np.bool_]] = []
        self.begins: list[NDArray[np.bool_]] = []
        self.filled = 0
        """Tokens in all rows so far; the current row holds `filled % seq_len`."""
        self.truncated = 0

    @property
    def room(self) -> int:
        """Number of tokens that still fit in the current row; `seq_len` if no row has been begun."""
        return self.seq_len - self.filled % self.seq_len

    def add(self, document: EncodedDocument) -> None:
        if document.whole and len(document.ids) > self.room:
            self.close_row()
        end = self.seq_len if document.whole else len(document.ids)
        self.truncated += len(document.ids) > end
        self._append(document.ids[:end], document.is_target[:end])

    def close_row(self) -> None:
        """Pad the current row, if one has been begun."""
        count = -self.filled % self.seq_len
        self._append(np.full(count, self.pad_id, dtype=np.int32), np.zeros(count, dtype=np.bool_))

    def _append(self, ids: NDArray[np.int32], is_target: NDArray[np.bool_]) -> None:
        self.ids.append(ids)
        self.targets.append(is_target)
        self.begins.append(np.arange(len(ids)) == 0)
        self.filled += len(ids)

    def rows(self, keeps_apart: bool) -> PackedRows:
        self.close_row()
        ids = np.concatenate([np.empty(0, dtype=np.int32), *self.ids]).reshape(-1, self.seq_len)
        is_target = np.concatenate([np.empty(0, dtype=np.bool_), *self.targets]).reshape(-1, self.seq_len)
        begins = np.concatenate([np.empty(0, dtype=np.bool_), *self.begins]).reshape(-1, self.seq_len)
        begins[:, 0] = True  # a text may go on in the next row
        useful = is_target[:, 1:].any(axis=1)  # a row without a target would only cost time
        return PackedRows(ids[useful], is_target[useful], self.truncated, begins[useful] if keeps_apart else None)


def pack(documents: Iterable[EncodedDocument], seq_len: int, pad_id: int, keeps_apart: bool = False) -> PackedRows:
    """Lay out documents in rows by the policy above; rows without any target are left out.

    Args:
        documents: in the order of the source.
        seq_len: tokens per row, at least 2.
        pad_id: the token that pads rows which end early; never a target.
        keeps_apart: whether batches have `position_ids`: `data.document_mask`.

    Raises:
        ConfigError: `seq_len` is less than 2; a row of one token has nothing to predict.
    """
    if seq_len < 2:
        raise ConfigError(
            f"data.seq_len={seq_len}: must be at least 2, one token to predict and one to predict it from"
        )
    packer = _Packer(seq_len, pad_id)
    for document in documents:
        packer.add(document)
    return packer.rows(keeps_apart)

"""Tasks whose rows are texts that a tokenizer encodes one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash

from shardwise.errors import ConfigError
from shardwise.hub import shown
from shardwise.train.build.models import TextShape
from shardwise.train.config.schema import Config, DataConfig
from shardwise.train.data.micro_batch import Draw
from shardwise.train.data.tables import read_table
from shardwise.train.tasks.examples import Collate, Example, Examples
from shardwise.train.tasks.labels import labels_in_words, labels_of
from shardwise.train.tasks.objectives import Objective, OneLabel
from shardwise.train.tasks.processors import Pretrained, in_words, padding_tokenizer
from shardwise.train.tasks.task import Sampler, Task

_AT_ONCE = 1000
"""Rows that are given to a tokenizer at once."""
_PAIRS = (("text", "text_pair"), ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question", "sentence"))
"""Names of two texts of which a row has both."""


def sequence_classification(config: Config) -> Task:
    """Read rows of a text, or of two, with a label. Not collective. Raises as `load_task`."""
    table = read_table(config.data, "a text and a label")
    tokenizer = padding_tokenizer(config.data.tokenizer)
    pair = next((pair for pair in _PAIRS if all(map(table.find, pair))), None)
    columns = pair or (table.column("text", "sentence"),)
    label = table.column("label", "labels")
    values = table.rows[label][:]
    labels = labels_of(config.model, table.rows.features[label], values, label)
    ids = [labels.of(value, key, label) for value, key in zip(values, table.keys, strict=True)]
    texts = [table.texts(column) for column in columns]
    encoded = encode(tokenizer, config.data.seq_len, *texts)
    examples = [{**example, "labels": one} for example, one in zip(encoded.examples, ids, strict=True)]

    from transformers import DataCollatorWithPadding

    collate = without_draws(DataCollatorWithPadding(tokenizer, return_tensors="np"))
    train, held_out = ([examples[row] for row in rows] for rows in table.split(config.data.eval_fraction))
    data = TextData(tokenizer, Examples(train, collate), Examples(held_out, collate), encoded.cut, labels.names)
    return assembled(config, data, OneLabel(len(labels.names)))


class Encoded(NamedTuple):
    """Texts as token ids."""

    examples: list[Example]
    cut: int
    """How many were longer than a row, and lost their end."""


def encode(tokenizer: Any, seq_len: int, *texts: Sequence[Any], **options: Any) -> Encoded:
    """Encode texts, with the tokenizer's special tokens.

    Args:
        tokenizer: of transformers.
        seq_len: tokens of the longest example.
        texts: one sequence of texts, or two of the same length whose texts are joined by pairs.
        options: more options of the tokenizer.
    """
    examples: list[Example] = []
    cut = 0
    for first in range(0, len(texts[0]), _AT_ONCE):
        part = [list(column[first : first + _AT_ONCE]) for column in texts]
        batch = tokenizer(*part, truncation=True, max_length=seq_len, **options)
        names = [name for name in batch if name in tokenizer.model_input_names]
        columns = [[np.array(ids, dtype=np.int32) for ids in batch[name]] for name in names]
        examples += [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        if tokenizer.is_fast:
            cut += sum(bool(encoding.overflowing) for encoding in batch.encodings)
    return Encoded(examples, cut)


def without_draws(collator: Callable[[list[dict[str, Any]]], Any]) -> Collate:
    """Return one of transformers' collators, which draws no random numbers, as a `Collate`."""

    def collate(examples: list[dict[str, Any]], draws: Sequence[Draw]) -> Any:
        return collator(examples)

    return collate


@dataclass(frozen=True, slots=True, eq=False)
class TextData:
    """Encoded texts."""

    tokenizer: Any
    """Of transformers, with a token for padding."""
    train: Examples
    held_out: Examples
    cut: int = 0
    """How many examples were longer than a row."""
    labels: tuple[str, ...] = ()
    """Their names, for a head."""

    def __str__(self) -> str:
        """Describe the data in words that are equal if and only if the data is."""
        digest = xxhash.xxh3_64_hexdigest(f"{self.train.digest} {self.held_out.digest}".encode())
        return (
            f"{len(self.train):,} rows to train on and {len(self.held_out):,} held out (digest {digest}), of "
            f"{len(self.tokenizer)} token ids and the labels {', '.join(self.labels) or 'none'}"
        )


def assembled(config: Config, data: TextData, objective: Objective, sample: Sampler | None = None) -> Task:
    """Return the task of encoded texts. Raises ConfigError if there is no row to train on."""
    if not len(data.train):
        raise ConfigError(f"data.source={config.data.source!r} has no row to train on")
    tokenizer = data.tokenizer
    end_id = tokenizer.pad_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return Task(
        objective=objective,
        train=data.train,
        held_out=data.held_out,
        shape=TextShape(len(tokenizer), end_id, config.data.seq_len, tokenizer.pad_token_id, data.labels),
        processor=Pretrained(tokenizer),
        reads=in_words(config.data.tokenizer, tokenizer),
        says=tuple(_says(config.data, data)),
        words=str(data),
        sample=sample,
    )


def _says(config: DataConfig, data: TextData) -> Iterator[str]:
    lengths = [len(example["input_ids"]) for example in data.train.encoded]
    yield (
        f"{shown(config.source)}: {len(data.train):,} rows of {min(lengths):,} to {max(lengths):,} tokens to train on, "
        f"{len(data.held_out):,} held out{labels_in_words(data.labels)}"
    )
    if data.cut:
        yield f"{data.cut} examples are longer than seq_len={config.seq_len} and are cut at the end"

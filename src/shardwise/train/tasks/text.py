"""Tasks whose rows are texts that a tokenizer encodes one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from shardwise.errors import ConfigError
from shardwise.hub import shown
from shardwise.train.build.models import TextShape
from shardwise.train.config.schema import Config, DataConfig
from shardwise.train.data.documents import Document
from shardwise.train.data.holdout import hold_out
from shardwise.train.data.micro_batch import IGNORED, Draw, Part
from shardwise.train.data.sources import read_documents
from shardwise.train.data.tables import SOURCES, TARGETS, Table, read_table
from shardwise.train.process.ranks import Ranks
from shardwise.train.run.sample import NEW_TOKENS, Sample
from shardwise.train.tasks.examples import Collate, Example, Examples
from shardwise.train.tasks.labels import labels_in_words, labels_of
from shardwise.train.tasks.objectives import Objective, OneLabel, SameToken, tags_objective
from shardwise.train.tasks.processors import Pretrained, check_fast, in_words, padding_tokenizer
from shardwise.train.tasks.task import Sampler, Task, shares

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
    data = TextData(tokenizer, *_divided(table, config.data, examples, collate), encoded.cut, labels.names)
    return assembled(config, data, OneLabel(len(labels.names)))


def token_classification(config: Config) -> Task:
    """Read rows of words with a tag for each. A word's first token has its tag; the others are no targets. Not
    collective. Raises as `load_task`."""
    table = read_table(config.data, "tokens and tags")
    tokenizer = padding_tokenizer(config.data.tokenizer)
    check_fast(tokenizer, config.data.tokenizer, "token-classification")
    words, tags = table.column("tokens", "words"), table.column("tags", "ner_tags", "labels")
    said, tagged = (table.rows[column][:] for column in (words, tags))
    for key, row, of_row in zip(table.keys, said, tagged, strict=True):
        if not isinstance(row, list) or not isinstance(of_row, list) or len(row) != len(of_row):
            raise ConfigError(f"{key}: {words} and {tags} must be lists of the same length")
    feature = getattr(table.rows.features[tags], "feature", None)
    labels = labels_of(config.model, feature, (tag for row in tagged for tag in row), tags)
    ids = [[labels.of(tag, key, tags) for tag in row] for key, row in zip(table.keys, tagged, strict=True)]
    encoded = encode(tokenizer, config.data.seq_len, said, is_split_into_words=True)
    examples = [
        {**example, "labels": _of_first_tokens(of_words, row)}
        for example, of_words, row in zip(encoded.examples, encoded.words, ids, strict=True)
    ]

    from transformers import DataCollatorForTokenClassification

    collate = without_draws(DataCollatorForTokenClassification(tokenizer, return_tensors="np"))
    data = TextData(tokenizer, *_divided(table, config.data, examples, collate), encoded.cut, labels.names)
    return assembled(config, data, tags_objective(labels.names))


def _of_first_tokens(words: Sequence[int | None], labels: Sequence[int]) -> NDArray[np.int64]:
    """Return a label for each token: that of its word for the first token of a word, else -100.

    words: by token, the index of its word; None for special tokens.
    """
    firsts = [word is not None and (not at or words[at - 1] != word) for at, word in enumerate(words)]
    return np.array(
        [labels[word] if first and word is not None else IGNORED for first, word in zip(firsts, words, strict=True)]
    )


def masked_lm(config: Config) -> Task:
    """Read texts, of which 15 % of the tokens are hidden and predicted. A long text becomes several rows. Which tokens
    are hidden depends on `data.seed` and on the row's place in the order, so they differ between epochs and not between
    numbers of ranks. Not collective. Raises as `load_task`."""
    data = config.data
    tokenizer = padding_tokenizer(data.tokenizer)
    check_fast(tokenizer, data.tokenizer, "masked-lm")
    if tokenizer.mask_token_id is None:
        raise ConfigError(f"data.tokenizer={data.tokenizer!r} has no mask_token, which masked-lm puts over words")

    from transformers import DataCollatorForLanguageModeling, DataCollatorForTokenClassification

    hide = DataCollatorForLanguageModeling(tokenizer, return_tensors="np")
    pad = DataCollatorForTokenClassification(tokenizer, return_tensors="np")

    def collate(examples: list[dict[str, Any]], draws: Sequence[Draw]) -> Any:
        return pad([_hidden(hide, row, data.seed, draw.sample) for row, draw in zip(examples, draws, strict=True)])

    train, held_out, parts = list[Example](), list[Example](), list[Part]()
    for source in data.each_source:
        documents = read_documents(source.source, source.format, source.subset, source.split)
        for document in documents:
            if document.whole:
                raise ConfigError(f"{document.key}: masked-lm reads rows of text, not of conversations or prompts")
        of_source, out = (_cut(part, tokenizer, data.seq_len) for part in hold_out(documents, data.eval_fraction))
        if not of_source:
            raise ConfigError(f"data.source={source.source!r} has no text to train on")
        train += of_source
        held_out += out
        parts.append(Part(len(of_source), source.weight))
    mixed = tuple(parts) if len(parts) > 1 else ()
    rows = TextData(tokenizer, Examples(train, collate, mixed), Examples(held_out, collate))
    return assembled(config, rows, SameToken())


def _cut(documents: Sequence[Document], tokenizer: Any, seq_len: int) -> list[Example]:
    """Return the rows of documents of text, without those that have special tokens alone."""
    texts = ["".join(segment.text for segment in document.segments) for document in documents]
    rows = encode(tokenizer, seq_len, texts, return_overflowing_tokens=True).examples
    return [row for row in rows if not np.isin(row["input_ids"], tokenizer.all_special_ids).all()]


def _hidden(hide: Any, example: dict[str, Any], seed: int, sample: int) -> dict[str, Any]:
    """Return an example with some of its tokens hidden, at least one, and these as labels."""
    hide.generator = np.random.default_rng([seed, sample])
    while True:
        batch = hide([example])
        if (batch["labels"] != IGNORED).any():
            return {name: values[0].tolist() for name, values in batch.items()}


def seq2seq_lm(config: Config) -> Task:
    """Read rows of a text and the text that is to be written for it. Not collective. Raises as `load_task`."""
    table = read_table(config.data, "a text and a target")
    tokenizer = padding_tokenizer(config.data.tokenizer)
    source = table.column(*SOURCES)
    target = table.column(*TARGETS)
    encoded = encode(tokenizer, config.data.seq_len, table.texts(source))
    answers = encode(tokenizer, config.data.seq_len, table.texts(target), as_target=True)
    examples = [
        {**example, "labels": _ended(answer["input_ids"], tokenizer)}
        for example, answer in zip(encoded.examples, answers.examples, strict=True)
    ]

    from transformers import DataCollatorForSeq2Seq

    collate = without_draws(DataCollatorForSeq2Seq(tokenizer, return_tensors="np"))
    data = TextData(tokenizer, *_divided(table, config.data, examples, collate), encoded.cut + answers.cut)
    example = (data.held_out.encoded or data.train.encoded)[0]
    return assembled(config, data, SameToken(), partial(_answer, tokenizer=tokenizer, example=example))


def _divided(
    table: Table, config: DataConfig, examples: Sequence[Example], collate: Collate
) -> tuple[Examples, Examples]:
    """Return the examples to train on and those that are held out. examples: of all rows of the table."""
    split = table.split(config.eval_fraction)
    train, held_out = ([examples[row] for row in rows] for rows in (split.train, split.held_out))
    return Examples(train, collate, split.parts), Examples(held_out, collate)


def _ended(ids: NDArray[np.int32], tokenizer: Any) -> NDArray[np.int32]:
    """Return a target with a token that ends it, if the tokenizer puts none there."""
    if tokenizer.eos_token_id is None or (len(ids) and ids[-1] in tokenizer.all_special_ids):
        return ids
    return np.append(ids, np.int32(tokenizer.eos_token_id))


def _answer(model: Any, ranks: Ranks, tokenizer: Any, example: Example) -> Sample:
    """Let the model write for an example. Every rank must call this; all write the same."""
    ids = torch.from_numpy(example["input_ids"]).long().to(ranks.device)[None]
    model.eval()
    with torch.no_grad():
        written = model.generate(input_ids=ids, max_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1)
    model.train()
    prompt, answer = (str(tokenizer.decode(one[0].tolist(), skip_special_tokens=True)) for one in (ids, written))
    return Sample(f"{prompt}\n", answer)


class Encoded(NamedTuple):
    """Texts as token ids."""

    examples: list[Example]
    cut: int
    """How many were longer than a row, and lost their end."""
    words: list[list[int | None]]
    """By example and token, the index of the word that it belongs to; empty for a slow tokenizer."""


def encode(tokenizer: Any, seq_len: int, *texts: Sequence[Any], as_target: bool = False, **options: Any) -> Encoded:
    """Encode texts, with the tokenizer's special tokens.

    Args:
        tokenizer: of transformers.
        seq_len: tokens of the longest example.
        texts: one sequence of texts, or two of the same length whose texts are joined by pairs.
        as_target: whether they are what a decoder writes, for which a tokenizer may have other special tokens.
        options: more options of the tokenizer.
    """
    found = Encoded([], 0, [])
    cut = 0
    for first in range(0, len(texts[0]), _AT_ONCE):
        part = [list(column[first : first + _AT_ONCE]) for column in texts]
        given = {"text_target": part[0]} if as_target else dict(zip(("text", "text_pair"), part, strict=False))
        batch = tokenizer(**given, truncation=True, max_length=seq_len, **options)
        names = [name for name in batch if name in tokenizer.model_input_names]
        columns = [[np.array(ids, dtype=np.int32) for ids in batch[name]] for name in names]
        found.examples.extend(dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))
        if tokenizer.is_fast:
            cut += sum(bool(encoding.overflowing) for encoding in batch.encodings)
            found.words.extend(encoding.word_ids for encoding in batch.encodings)
    return found._replace(cut=cut)


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
    """Return the task of encoded texts."""
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
        f"{shown(config.named)}: {len(data.train):,} rows of {min(lengths):,} to {max(lengths):,} tokens to train on, "
        f"{len(data.held_out):,} held out{labels_in_words(data.labels)}"
    )
    yield from shares(config, data.train)
    if data.cut:
        yield f"{data.cut} examples are longer than seq_len={config.seq_len} and are cut at the end"

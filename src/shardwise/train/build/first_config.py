"""A first configuration for a model and data, with values that suit both and comments that say why."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from shardwise.errors import ConfigError
from shardwise.toml_text import toml_value
from shardwise.train.build.models import TextShape, build_model, positions_and_dtype
from shardwise.train.config.files import config_of
from shardwise.train.config.schema import RANDOM, Config, ModelConfig
from shardwise.train.config.tasks import DEFAULT
from shardwise.train.data.documents import Document
from shardwise.train.data.encoding import encode_document
from shardwise.train.data.model_files import fetch, has_weights, settled
from shardwise.train.data.rows import document_of_row, kind_of
from shardwise.train.data.sources import each_row
from shardwise.train.data.tokenizer import Tokenizer, load_tokenizer

_LOOKED_AT = 256
"""Number of documents that are tokenized to learn their lengths."""
_COUNTED = 200_000
"""Number of documents that are counted at most."""
_LONGEST_ROW = 2048
_PASSES = 3
_MOST_STEPS = 10_000
_LARGE, _SMALL = 10**9, 10**8
"""Numbers of parameters: from the first on, memory is what limits a step; below the second, learning rates are high."""
_KINDS = {
    "messages": "rows of messages; the assistant's are learnt",
    "conversations": "rows of conversations (ShareGPT); the assistant's turns are learnt",
    "instruction": "rows of instruction and output (Alpaca), as user and assistant; the output is learnt",
    "prompt and completion": "rows of prompt and completion; the completion is learnt",
    "text": "texts, one after another; all tokens are learnt",
}
"""What a row is, by its kind in `rows.KINDS`."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user decides."""

    model: str
    """A directory, a `config.json`, or a name on a hub."""
    data: str
    """A value of `data.source`."""
    split: str | None = None
    subset: str | None = None
    lora: int = 0
    """`lora.r`."""
    ranks: int | None = None
    """`parallel.ranks`; None = "auto"."""
    steps: int | None = None
    seq_len: int | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """What is known of a model."""

    numel: int
    """Number of its parameters."""
    is_trained: bool
    """Whether it has weights to start from."""
    positions: int | None
    stored: str
    """The dtype that its configuration names, for `model.dtype`."""
    class_name: str

    def __str__(self) -> str:
        million = self.numel / 1e6
        return f"{self.class_name}, {f'{million:,.1f} M' if million >= 1 else f'{self.numel:,}'} parameters"


@dataclass(frozen=True, slots=True)
class Rows:
    """What is known of the data."""

    kind: str
    """A key of `rows.KINDS`."""
    count: int
    is_whole: bool
    """Whether all documents were counted."""
    tokens: float
    """Number of tokens of all of them, estimated from the first."""
    longest: int
    """Tokens of the longest of those looked at."""

    @property
    def continues(self) -> bool:
        """Whether documents follow each other without padding, and may be cut."""
        return self.kind == "text"


@dataclass(frozen=True, slots=True)
class First:
    """A first configuration, and what it was made from."""

    text: str
    """The TOML file."""
    config: Config
    model: Model
    rows: Rows
    has_template: bool
    """Whether the tokenizer has a chat template."""


def model_section(name: str) -> dict[str, Any]:
    """Return the keys of `[model]` that name a model. Raises HubError if it is named on a hub that cannot be asked."""
    directory = ModelConfig(path=name).directory
    assert directory is not None
    return {"path": name} if has_weights(directory) else {"path": name, "weights": RANDOM}


def first_config(asked: Asked, name: str, ranks: int, say: Callable[[str], None]) -> First:
    """Look at a model and at data, and return a configuration that trains the one on the other.

    Configuration, tokenizer and data set are fetched if they are named on a hub; weights are not.

    Args:
        asked: the user's decisions.
        name: the run's.
        ranks: number of ranks that "auto" will be on this machine.
        say: takes a line about each download.

    Raises:
        ConfigError: the model cannot be built, or the data has no rows of a kind that can be trained on.
        HubError: a name of a hub has no such files, or they cannot be fetched.
    """
    model_keys = model_section(asked.model)
    data_keys = {key: value for key, value in
                 {"source": asked.data, "split": asked.split, "subset": asked.subset}.items() if value}  # fmt: skip
    tree = {"model": model_keys, "data": data_keys, "train": {"steps": 1}, "log": {"name": name}}
    config = settled(config_of(tree, "shardwise init"))
    if config.model.task != DEFAULT:
        raise ConfigError(
            f"{asked.model} is a model for {config.model.task}, and `shardwise init` writes configurations for "
            f"{DEFAULT} alone: docs/user-guide.md#tasks has one to start from"
        )
    fetch(config, False, say)
    tokenizer = load_tokenizer(config.data.tokenizer)
    rows = _look_at_rows(config, tokenizer)
    model = _look_at_model(config.model, tokenizer, "weights" not in model_keys)
    text = _text(asked, model_keys, data_keys, model, rows, asked.ranks or ranks)
    whole = config_of({**tomllib.loads(text), "log": {"name": name}}, "shardwise init")
    return First(text, whole, model, rows, bool(getattr(tokenizer, "chat_template", None)))


def _look_at_rows(config: Config, tokenizer: Tokenizer) -> Rows:
    data = config.data
    rows = each_row(data.source, data.format, data.subset, data.split)
    kind = ""

    def documents() -> Iterator[Document]:
        nonlocal kind
        for key, row in rows:
            kind = kind or kind_of(key, row)
            document = document_of_row(key, row)
            if document is not None:
                yield document

    each = documents()
    first = list(islice(each, _LOOKED_AT))
    if not first:
        raise ConfigError(f"data.source={data.source!r} has no text in it")
    lengths = [len(encode_document(document, tokenizer).ids) for document in first]
    known = sum(map(_characters, first))
    count, characters = len(first), known
    for document in islice(each, _COUNTED):
        count, characters = count + 1, characters + _characters(document)
    tokens = sum(lengths) * characters / max(known, 1)
    return Rows(kind, count, next(each, None) is None, tokens, max(lengths))


def _characters(document: Document) -> int:
    said = sum(len(message["content"]) for message in document.messages)
    return said + sum(len(segment.text) for segment in document.segments)


def _look_at_model(config: ModelConfig, tokenizer: Tokenizer, is_trained: bool) -> Model:
    positions, stored = positions_and_dtype(config)
    shape = TextShape(tokenizer.vocab_size, tokenizer.end_id, 1)
    built = build_model(config, shape)
    numel = sum(parameter.numel() for parameter in built.parameters())
    return Model(numel, is_trained, positions, stored, type(built).__name__)


def _row_length(asked: Asked, model: Model, rows: Rows) -> int:
    """Return `data.seq_len`: enough for the longest example, or for a text a common length that fills some rows."""
    most = min(model.positions or _LONGEST_ROW, _LONGEST_ROW)
    if asked.seq_len is not None:
        return asked.seq_len
    if rows.continues:
        return max(8, min(most, 1024, int(rows.tokens) // 8))
    return min(most, max(64, -(-rows.longest // 64) * 64))


def _steps(asked: Asked, rows: Rows, seq_len: int, batch: int) -> tuple[int, str]:
    """Return `train.steps`, and what that number is."""
    if asked.steps is not None:
        return asked.steps, ""
    packed = max(1, math.ceil(rows.tokens / seq_len))
    wanted = max(20, math.ceil(_PASSES * packed / batch))
    about = f"about {packed:,} rows of {seq_len} tokens" if rows.is_whole else f"more than {packed:,} rows"
    if wanted > _MOST_STEPS:
        return _MOST_STEPS, f"of {wanted:,} for {_PASSES} passes over {about}"
    passes = round(wanted * batch / packed)
    return wanted, f"{passes} passes over {about}"


def _text(
    asked: Asked, model_keys: dict[str, Any], data_keys: dict[str, Any], model: Model, rows: Rows, ranks: int
) -> str:
    is_large = model.numel >= _LARGE
    seq_len = _row_length(asked, model, rows)
    micro_batch = 1 if is_large else 4
    steps, passes = _steps(asked, rows, seq_len, micro_batch * ranks)
    every = max(1, steps // 5)
    held_out = 0.0 if rows.count == 1 and not rows.continues else 0.05 if rows.count >= 100 else 0.2
    adapter = asked.lora > 0
    dtype = model.stored if adapter and model.is_trained else "fp32"
    lr = "2e-4" if adapter else "2e-5" if model.is_trained else "1e-3" if model.numel < _SMALL else "3e-4"
    cut = f"{rows.longest:,} tokens are the longest of the first {min(rows.count, _LOOKED_AT)} examples; more are cut"
    lines = _Lines()
    lines.comment(
        "A run of `shardwise train`. Paths are relative to where you call it. Any key can be overridden on the"
    )
    lines.comment("command line, as in train.steps=100. All keys: src/shardwise/train/config/schema.py")
    lines.section("model")
    lines.key("path", model_keys["path"], str(model))
    if not model.is_trained:
        lines.key("weights", RANDOM, "it has no weights to start from")
    lines.key("dtype", dtype, "of the frozen weights" if adapter else "of the trained weights")
    if adapter:
        lines.section("lora")
        lines.key("r", asked.lora, "the rank of the adapters, which alone are trained and saved, in fp32")
        lines.key("alpha", 2.0 * asked.lora, "their output is scaled by alpha / r")
        lines.comment('base = "nf4"  # the frozen linear layers in 4 bits (QLoRA): a quarter of bf16\'s memory')
    lines.section("data")
    for key, value in data_keys.items():
        lines.key(key, value, _KINDS[rows.kind] if key == "source" else "")
    lines.key("seq_len", seq_len, "tokens of a row" if rows.continues or asked.seq_len else cut)
    if not rows.continues:
        lines.comment("document_mask = true  # examples that share a row do not see one another; most models can")
    lines.key("eval_fraction", held_out, "of the documents, held out to evaluate on")
    lines.section("train")
    lines.key("steps", steps, passes)
    lines.key("micro_batch", micro_batch, "rows that a rank computes at once; lower it if memory is short")
    lines.comment(
        f"global_batch = {4 * micro_batch * ranks}  # rows of a step over all ranks, in several micro-batches"
    )
    lines.raw("lr", lr, "the highest; lower it if the loss jumps" if model.is_trained else "the highest")
    lines.key("warmup_steps", max(1, steps // 20), "")
    if held_out:
        lines.key("eval_every", every, "steps")
    recompute = lines.key if is_large else lines.commented
    recompute("activation_checkpointing", "full", "recomputes blocks in backward: less memory, a third more time")
    lines.section("parallel")
    where = "all GPUs of this machine, else 2 CPU ranks"
    lines.key("ranks", asked.ranks or "auto", "on this machine" if asked.ranks else where)
    lines.key("strategy", "full_shard", "weights, gradients and optimizer state are sharded over the ranks")
    lines.section("checkpoint")
    lines.key("every", every, "steps; a run that is started again goes on from the newest")
    return lines.text


class _Lines:
    """A TOML file, line by line."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def comment(self, text: str) -> None:
        self._lines.append(f"# {text}")

    def section(self, name: str) -> None:
        self._lines += ["", f"[{name}]"]

    def key(self, name: str, value: object, why: str) -> None:
        self.raw(name, toml_value(value), why)

    def commented(self, name: str, value: object, why: str) -> None:
        """Add a key that the file names and does not set."""
        self.raw(f"# {name}", toml_value(value), why)

    def raw(self, name: str, value: str, why: str) -> None:
        self._lines.append(f"{name} = {value}" + (f"  # {why}" if why else ""))

    @property
    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

"""A first configuration for a model and data, with values that suit both and comments that say why."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from shardwise.errors import ConfigError
from shardwise.hub import local
from shardwise.toml_text import toml_value
from shardwise.train.build.models import TextShape, build_model, positions_and_dtype
from shardwise.train.config.files import config_of
from shardwise.train.config.schema import RANDOM, Config, DataConfig, ModelConfig
from shardwise.train.config.tasks import DEFAULT, TaskName, class_for, named_task
from shardwise.train.data.documents import Document
from shardwise.train.data.encoding import encode_document
from shardwise.train.data.micro_batch import Draw, MicroBatch
from shardwise.train.data.model_files import fetch, model_section, settled
from shardwise.train.data.rows import KINDS, document_of_row, filled, kind_of
from shardwise.train.data.sources import each_row, folder_of_pictures, is_saved
from shardwise.train.data.streaming import Stream
from shardwise.train.data.tables import SOURCES, TARGETS, is_folder_of_pictures
from shardwise.train.data.tokenizer import Tokenizer, load_tokenizer
from shardwise.train.tasks.loading import load_task
from shardwise.train.tasks.task import Task

_LOOKED_AT = 256
"""Number of documents that are tokenized to learn their lengths."""
_COUNTED = 200_000
"""Number of documents that are counted at most."""
_LONGEST_ROW = 2048
_PASSES = 3
_LONGEST_PROMPT, _FIRST_WORDS = 100, 6
"""Characters of an example that the proposed prompt may have, and how many words of it are left of a longer one."""
_MOST_STEPS = 10_000
_LARGE, _SMALL = 10**9, 10**8
"""Numbers of parameters: from the first on, memory is what limits a step; below the second, learning rates are high."""
_KINDS = {
    "messages": "rows of messages; the assistant's are learnt",
    "conversations": "rows of conversations (ShareGPT); the assistant's turns are learnt",
    "instruction": "rows of instruction and output (Alpaca), as user and assistant; the output is learnt",
    "prompt and completion": "rows of prompt and completion; the completion is learnt",
    "text": "texts, one after another; all tokens are learnt",
    "masked-lm": "texts; 15 % of their tokens are hidden and learnt",
    "seq2seq-lm": "texts, each with the text that is written for it",
    "sequence-classification": "texts with a label",
    "token-classification": "words with a tag for each",
    "image-classification": "pictures with a label",
    "image-text-to-text": "pictures with a conversation; the assistant's replies are learnt",
}
"""What a row is: of a causal language model by its kind in `rows.KINDS`, of others by their task."""
_PICTURE, _LABEL = ("image", "images", "img"), ("label", "labels")
_NEEDED: Mapping[TaskName, tuple[tuple[str, ...], ...]] = {
    "image-text-to-text": (_PICTURE, ("messages", "prompt", "question")),
    "image-classification": (_PICTURE, _LABEL),
    "token-classification": (("tokens", "words"), ("tags", "ner_tags", "labels")),
    "sequence-classification": (("text", "sentence", "sentence1", "premise", "question"), _LABEL),
    "seq2seq-lm": (SOURCES, TARGETS),
    "causal-lm": (("text", "messages", "conversations", "instruction", "prompt"),),
    "masked-lm": (("text",),),
}
"""Columns by which the rows of a task are recognised, one of each of these; tasks with more special rows come first."""
_OF_LABELS = tuple(_NEEDED)[:4]


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
    task: TaskName | None = None
    """None = by the model's architecture and the rows' columns."""


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
    """A key of `_KINDS`."""
    count: int
    is_whole: bool
    """Whether all documents were counted."""
    tokens: float
    """Number of tokens of all of them, estimated from the first; 0 for pictures alone."""
    longest: int
    """Tokens of the longest of those looked at."""
    begins: str = ""
    """What the model could be asked: the first example's prompt, or the beginning of its text; empty where there is
    none."""

    @property
    def is_packed(self) -> bool:
        """Whether several documents may share a sequence of `data.seq_len`, as they do for causal language models."""
        return self.kind in KINDS

    @property
    def unit(self) -> str:
        """What a micro-batch has some of: several documents may share a sequence."""
        return "sequences" if self.is_packed else "rows"

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
    task: TaskName
    model: Model
    rows: Rows
    has_template: bool
    """Whether the tokenizer has a chat template."""


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
    tree = _tree(asked, name)
    config = _found(tree, say)
    task = asked.task or task_of_rows(config)
    if config.model.task != task or task != DEFAULT:
        tree["model"]["task"] = task
        config = _found(tree, say)
    template = False
    if task == DEFAULT:
        tokenizer = load_tokenizer(config.data.tokenizer)
        rows = _look_at_rows(config, tokenizer)
        shape = TextShape(tokenizer.vocab_size, tokenizer.end_id, 1)
        template = bool(getattr(tokenizer, "chat_template", None))
    else:
        loaded, rows = _look_at_task(config, task)
        shape = replace(loaded.shape, seq_len=1)
    model = _look_at_model(config.model, shape, "weights" not in tree["model"])
    text = _text(asked, tree["model"], tree["data"], model, rows, asked.ranks or ranks)
    whole = config_of({**tomllib.loads(text), "log": {"name": name}}, "shardwise init")
    return First(text, whole, task, model, rows, template)


def first_task(asked: Asked, say: Callable[[str], None]) -> TaskName:
    """Return the task that a model and rows suggest. Raises as `first_config`."""
    return task_of_rows(_found(_tree(asked, "init"), say))


def _tree(asked: Asked, name: str) -> dict[str, dict[str, Any]]:
    data_keys = {key: value for key, value in
                 {"source": asked.data, "split": asked.split, "subset": asked.subset}.items() if value}  # fmt: skip
    model_keys = model_section(asked.model)
    return {"model": model_keys, "data": data_keys, "train": {"steps": 1}, "log": {"name": name}}


def _found(tree: dict[str, Any], say: Callable[[str], None]) -> Config:
    """Return the settled configuration of these keys, after fetching what it names on a hub, without weights."""
    config = settled(config_of(tree, "shardwise init"))
    fetch(config, False, say)
    return config


def task_of_rows(config: Config) -> TaskName:
    """Return the task that a model's architecture and the columns of the rows suggest: that of the architecture if the
    rows are for it. A model of masked words, or of no task, is taken for what the rows have labels for.

    Args:
        config: settled, and fetched.
    """
    path = local(config.model.path or "")
    described = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    columns = _columns(config.data)
    fitting = [
        task
        for task, needed in _NEEDED.items()
        if all(columns & set(names) for names in needed) and class_for(task, str(described.get("model_type")))
    ]
    own = named_task(described)
    labelled = [task for task in fitting if task in _OF_LABELS] if own in {None, "masked-lm"} else []
    return next(iter([*labelled, *([own] if own in fitting else []), *fitting]), config.model.task or DEFAULT)


def _columns(data: DataConfig) -> set[str]:
    """Return the fields of the first row."""
    if not is_saved(data.source) and is_folder_of_pictures(data.source):
        return set(folder_of_pictures(data.source).column_names)
    _, row = next(iter(each_row(data.source, data.format, data.subset, data.split)), ("", {}))
    return set(filled(row))


def _look_at_task(config: Config, task: TaskName) -> tuple[Task, Rows]:
    """Read the data of a task that is not a causal language model's, and look at its first rows."""
    positions, _ = positions_and_dtype(config.model)
    looks = {"seq_len": _longest_row(positions), "eval_fraction": 0.0}
    loaded = load_task(config.model_copy(update={"data": config.data.model_copy(update=looks)}))
    assert not isinstance(loaded.train, Stream)
    count = len(loaded.train)
    lengths = [_length(loaded.train.micro_batch([Draw(row, row)])) for row in range(min(count, _LOOKED_AT))]
    begins = _beginning(_source_text(config.data)) if task == "seq2seq-lm" else ""
    return loaded, Rows(task, count, True, sum(lengths) * count / len(lengths), max(lengths), begins)


def _source_text(data: DataConfig) -> str:
    """Return what a sequence-to-sequence model is given in the first row."""
    _, row = next(iter(each_row(data.source, data.format, data.subset, data.split)))
    return next((str(row[name]) for name in SOURCES if row.get(name)), "")


def _beginning(text: str) -> str:
    """Return a short text whole, and the first words of a longer one."""
    return text if len(text) <= _LONGEST_PROMPT else " ".join(text[:_LONGEST_PROMPT].split()[:_FIRST_WORDS])


def _length(batch: MicroBatch) -> int:
    """Return the tokens of a batch of one row, or of its target if that is longer; 0 for a picture without text."""
    ids = batch.inputs.get("input_ids")
    return 0 if ids is None else max(ids.shape[1:] + batch.labels.shape[1:])


def _longest_row(positions: int | None) -> int:
    """Return the tokens that a row has at most. Some models have a few positions that no token can have."""
    return min(positions or _LONGEST_ROW, _LONGEST_ROW) // 8 * 8


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
    begins = _beginning(next((segment.text for segment in first[0].segments), "").strip())
    return Rows(kind, count, next(each, None) is None, tokens, max(lengths), begins)


def _characters(document: Document) -> int:
    said = sum(len(message["content"]) for message in document.messages)
    return said + sum(len(segment.text) for segment in document.segments)


def _look_at_model(config: ModelConfig, shape: TextShape, is_trained: bool) -> Model:
    positions, stored = positions_and_dtype(config)
    built = build_model(config, shape)
    numel = sum(parameter.numel() for parameter in built.parameters())
    return Model(numel, is_trained, positions, stored, type(built).__name__)


def _row_length(asked: Asked, model: Model, rows: Rows) -> int:
    """Return `data.seq_len`: enough for the longest example, or for a text a common length that fills some rows."""
    most = _longest_row(model.positions)
    if asked.seq_len is not None:
        return asked.seq_len
    if rows.continues:
        return max(8, min(most, 1024, int(rows.tokens) // 8))
    return min(most, max(64, -(-rows.longest // 64) * 64))


def _steps(asked: Asked, rows: Rows, seq_len: int, batch: int) -> tuple[int, str]:
    """Return `train.steps`, and what that number is."""
    if asked.steps is not None:
        return asked.steps, ""
    packed = max(1, math.ceil(rows.tokens / seq_len)) if rows.is_packed else rows.count
    wanted = max(20, math.ceil(_PASSES * packed / batch))
    one = rows.unit
    about = f"{'about ' * rows.is_packed}{packed:,} {one}" if rows.is_whole else f"more than {packed:,} {one}"
    if rows.is_packed and rows.is_whole:
        about += f" of {seq_len} tokens"
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
    trained_lr = "1e-4" if rows.kind == "seq2seq-lm" else "2e-5"
    lr = "2e-4" if adapter else trained_lr if model.is_trained else "1e-3" if model.numel < _SMALL else "3e-4"
    cut = f"{rows.longest:,} tokens are the longest of the first {min(rows.count, _LOOKED_AT)} examples; more are cut"
    lines = _Lines()
    lines.comment(
        "A run of `shardwise train`. Paths are relative to where you call it. Any key can be overridden on the"
    )
    lines.comment(
        "command line, as in train.steps=100. All keys: shardwise/train/config/schema.py, where it is installed."
    )
    lines.section("model")
    lines.key("path", model_keys["path"], str(model))
    if "task" in model_keys:
        lines.key("task", model_keys["task"], "what is learnt, with transformers' class for it")
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
    if rows.longest:
        lines.key("seq_len", seq_len, "tokens of a sequence" if rows.continues or asked.seq_len else cut)
    if rows.is_packed and not rows.continues:
        lines.comment("document_mask = true  # examples that share a sequence do not see one another; most models can")
    lines.key("eval_fraction", held_out, "of the rows, held out to evaluate on")
    lines.section("train")
    lines.key("steps", steps, passes)
    lines.key("micro_batch", micro_batch, f"{rows.unit} that a rank computes at once; lower it if memory is short")
    lines.comment(
        f"global_batch = {4 * micro_batch * ranks}  # {rows.unit} of a step over all ranks, in several micro-batches"
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

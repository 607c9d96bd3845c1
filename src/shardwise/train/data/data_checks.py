"""Checks that find mistakes in the data within a second, before any rank is started. Imports no torch.

Large files are not read here; the ranks read them and report mistakes in them.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.hub import TOKENIZER_FILES, has_tokenizer, hub_name, local
from shardwise.suggest import nearest_path
from shardwise.train.config.files import reading
from shardwise.train.config.schema import DataConfig, ModelConfig, SourceConfig
from shardwise.train.config.tasks import DEFAULT, TaskName
from shardwise.train.data.corpus import BUILTIN_PREFIX, builtin
from shardwise.train.data.documents import Document
from shardwise.train.data.holdout import hold_out
from shardwise.train.data.rows import document_of_row
from shardwise.train.data.sources import check_keys, counted, find_files, format_of, is_saved, read_documents
from shardwise.train.data.tokenizer import BYTES, ByteTokenizer, tokenizer_directory

SMALL_BYTES = 2**20
"""Largest total size of a source's files that is read completely here."""


def check_data(config: DataConfig, task: TaskName = DEFAULT) -> None:
    """Raise ConfigError for a source that is missing, empty, in another format, without a text column, shorter than one
    sequence, or that cannot be split for evaluation; and for a tokenizer directory without a tokenizer."""
    _check_tokenizer(config.tokenizer)
    for source in config.each_source:
        _check_source(source, config, task)


def _check_source(config: SourceConfig, data: DataConfig, task: TaskName) -> None:
    check_keys(config)
    if config.source.startswith(BUILTIN_PREFIX):
        builtin(config.source)
        return
    if hub_name(config.source) is not None:
        return  # the ranks read it
    if is_saved(config.source):
        return  # likewise
    files = find_files(config.source)
    with reading("data.source", config.source):
        total_bytes = sum(file.stat().st_size for file in files)
        if not total_bytes:
            raise ConfigError(f"data.source={config.source!r} is empty: {counted(len(files))} with 0 bytes")
        if total_bytes > SMALL_BYTES:
            if task == DEFAULT:
                _check_first_row(files[0], config.format or format_of(files[0]))
            return
    if task != DEFAULT:
        return  # what its rows need depends on the model; the ranks check it
    documents = read_documents(config.source, config.format)
    hold_out(documents, data.eval_fraction)
    _check_length(documents, config, data.seq_len)


def check_model(model: ModelConfig, data: DataConfig) -> None:
    """Raise ConfigError if the model's configuration has a smaller vocabulary than the tokenizer, or fewer learned
    positions ("n_positions") than the data's sequences. Checks only models given by a configuration, and tokenizers
    that are "bytes" or have a `tokenizer.json`; the ranks check all others."""
    described = _described(model)
    vocabulary = _vocabulary_of(data.tokenizer)
    check_fits(_whole(described.get("vocab_size")), _whole(described.get("n_positions")), vocabulary, data.seq_len)


def check_axes(model: ModelConfig, tp: int, cp: int) -> None:
    """Raise ConfigError if a model that is given by a configuration has heads of attention that `parallel.tp` or `cp`
    does not divide, which the ranks check of all others; or if `cp` is to divide what is no row of next tokens."""
    if cp > 1 and model.task not in {None, DEFAULT}:
        raise ConfigError(f'parallel.cp={cp} divides the sequences of causal language models, not of "{model.task}"')
    described = _described(model)
    over = {"num_attention_heads": tp * cp, "num_key_value_heads": tp}
    for key, ranks in over.items():
        heads = _whole(described.get(key))
        if heads is not None and heads % ranks:
            asked = f"tp={tp}" if ranks == tp else f"tp={tp} x cp={cp}" if tp > 1 else f"cp={cp}"
            raise ConfigError(f"parallel.{asked} does not divide the model's {key}={heads}")


def check_fits(vocab_size: int | None, positions: int | None, needed: int | None, seq_len: int) -> None:
    """Raise ConfigError if a model is too small for the token ids or the sequences of the data. None means unknown.

    Args:
        vocab_size: the model's vocabulary size.
        positions: the longest sequence that the model can compute.
        needed: the tokenizer's vocabulary size: all token ids are below it.
        seq_len: tokens per sequence of the data.
    """
    if vocab_size is not None and needed is not None and vocab_size < needed:
        raise ConfigError(
            f"the model has vocab_size={vocab_size}, but the tokenizer needs {needed}: set vocab_size, or set "
            "data.tokenizer to the model's own tokenizer"
        )
    if positions is not None and positions < seq_len:
        raise ConfigError(
            f"data.seq_len={seq_len} is more than the model's max_position_embeddings={positions}; lower seq_len"
        )


def _check_tokenizer(name: str | None) -> None:
    if name is None or name == BYTES:
        return
    path = tokenizer_directory(name)
    with reading("data.tokenizer", name):
        if not path.is_dir():
            raise ConfigError(f"data.tokenizer={name!r}: no such directory{nearest_path(path)}")
        if not has_tokenizer(path):
            raise ConfigError(f"data.tokenizer={name!r} has no tokenizer (no {TOKENIZER_FILES[0]} or the like)")


def _check_first_row(file: Path, file_format: str) -> None:
    """Check the first row of a large table. Text has no rows, and Parquet is left to the ranks."""
    row: Any = None
    with file.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
        if file_format == "jsonl":
            first = next((line for line in lines if line.strip()), "")
            try:
                row = json.loads(first)
            except ValueError:
                return  # an array, or an object over several lines, which `datasets` can read
        elif file_format in {"csv", "tsv"}:
            row = next(csv.DictReader(lines, delimiter="\t" if file_format == "tsv" else ","), None)
    if isinstance(row, Mapping):
        document_of_row(f"{file.as_posix()}:1", row)


def _check_length(documents: list[Document], config: SourceConfig, seq_len: int) -> None:
    """Raise ConfigError for plain text that cannot fill one sequence: a text never has more tokens than bytes."""
    if any(document.whole for document in documents):
        return
    most_tokens = sum(
        len(segment.text.encode(errors="surrogateescape")) + 1 for one in documents for segment in one.segments
    )
    if most_tokens < seq_len:
        raise ConfigError(
            f"data.seq_len={seq_len} is longer than all of data.source={config.source!r}, which has "
            f"{most_tokens} bytes of text: lower seq_len, or give more text"
        )


def _vocabulary_of(name: str | None) -> int | None:
    """Return a number that all token ids are below; None if no `tokenizer.json` gives it."""
    if name is None or name == BYTES:
        return ByteTokenizer.vocab_size
    try:
        found = json.loads((tokenizer_directory(name) / "tokenizer.json").read_text(encoding="utf-8"))
        known = found["model"]["vocab"]
        ids = list(known.values()) if isinstance(known, dict) else range(len(known))
        added = [int(token["id"]) for token in found.get("added_tokens", ())]
        return 1 + int(max([*ids, *added]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _described(model: ModelConfig) -> Mapping[str, Any]:
    if model.config is not None:
        return model.config
    if model.path is None:
        return {}
    path = local(model.path)
    try:
        found = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None

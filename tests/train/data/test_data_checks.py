"""Mistakes in the data that are reported before any rank is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.train.config.schema import DataConfig, ModelConfig
from shardwise.train.data import data_checks
from shardwise.train.data.data_checks import check_data, check_model


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tokenizer").mkdir()
    words = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 9, "content": "<end>"}]}
    Path("tokenizer/tokenizer.json").write_text(json.dumps(words))


@pytest.mark.parametrize(
    ("name", "text", "options", "words"),
    [
        ("no.txt", None, {}, r"data\.source='no\.txt': no such files"),
        ("e.txt", "", {}, r"data\.source='e\.txt' is empty: 1 file with 0 bytes"),
        ("e.jsonl", '{"text": ""}\n', {}, r"has no text in its 1 file"),
        ("r.jsonl", '{"body": "x"}\n', {}, r"r\.jsonl:1: a row needs text, messages.* this one has body"),
        ("r.csv", "title,body\na,b\n", {}, r"r\.csv:1: a row needs text.* this one has title, body"),
        ("r.txt", "not json", {"format": "jsonl"}, r"r\.txt cannot be read as jsonl"),
        ("t.txt", "short", {"seq_len": 64}, r"data\.seq_len=64 is longer than all of data\.source='t\.txt', which has"),
        (
            "o.jsonl",
            '{"prompt": "a", "completion": "b"}\n',
            {},
            r"eval_fraction=0\.02: the source has only one example",
        ),
        ("t.txt", "x" * 99, {"tokenizer": "tokenzer"}, r"data\.tokenizer='tokenzer': no such directory; did you mean"),
        ("t.txt", "x" * 99, {"tokenizer": "."}, r"data\.tokenizer='\.' has no tokenizer"),
        ("builtin:stdlib", None, {}, r"unknown built-in corpus 'stdlib'; use builtin:stories or builtin:p"),
    ],
)
def test_mistakes(name: str, text: str | None, options: dict[str, Any], words: str) -> None:
    if text is not None:
        Path(name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        check_data(DataConfig(source=name, **{"seq_len": 8, **options}))


@pytest.mark.parametrize(
    ("name", "head"), [("big.jsonl", '{"body": "x"}\n'), ("big.csv", "body\nx\n"), ("big.tsv", "body\tb\nx\ty\n")]
)
def test_the_first_row_of_a_large_table(name: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(name).write_text(head + "x\n" * 100)
    monkeypatch.setattr(data_checks, "SMALL_BYTES", 64)
    monkeypatch.setattr(data_checks, "read_documents", lambda *_: pytest.fail("it is not read whole"))
    with pytest.raises(ConfigError, match=f"{name}:1: a row needs text"):
        check_data(DataConfig(source=name))
    check_data(DataConfig(source=name, format="parquet"))


def test_what_is_right_passes() -> None:
    Path("t.txt").write_text("to be or not to be, " * 9)
    Path("c.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 2)
    for source in ("t.txt", "c.jsonl", "builtin:python-stdlib"):
        check_data(DataConfig(source=source, seq_len=32, tokenizer="tokenizer"))


@pytest.mark.parametrize("inline", [True, False])
def test_a_model_too_small_for_the_data(inline: bool) -> None:
    def model(**sizes: int) -> ModelConfig:
        values = {"model_type": "gpt2", **sizes}
        Path("config.json").write_text(json.dumps(values))
        return ModelConfig(config=values) if inline else ModelConfig(path="config.json")

    words = DataConfig(tokenizer="tokenizer", seq_len=64)
    check_model(model(vocab_size=10, n_positions=64), words)
    check_model(model(), words)
    with pytest.raises(ConfigError, match="vocab_size=9, but the tokenizer needs 10"):
        check_model(model(vocab_size=9), words)
    with pytest.raises(ConfigError, match="vocab_size=256, but the tokenizer needs 320"):
        check_model(model(vocab_size=256), DataConfig())
    with pytest.raises(ConfigError, match="seq_len=64 is more than the model's max_position_embeddings=32"):
        check_model(model(n_positions=32), words)
    check_model(ModelConfig(factory="a:b"), words)

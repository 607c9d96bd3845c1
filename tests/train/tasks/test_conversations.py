"""Pictures with a conversation about them: what is learnt of a row, and a run from files to a model that is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.train.data.micro_batch import IGNORED, Draw
from shardwise.train.tasks.loading import load_task
from tests.ranks import RankPools
from tests.train.tasks.rig import RUN, TEMPLATE, configured, lines, losses, picture, save_llava, train, unsharded

datasets = pytest.importorskip("datasets")
pytest.importorskip("PIL.Image")

CONFIG = f"""
[model]
path = "llava"
weights = "random"
[data]
source = "talk.parquet"
seq_len = 64
eval_fraction = 0.2
{RUN.format(steps=4, more="")}
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_llava("llava")
    rows = []
    for number in range(19):
        data, name = picture(number)
        rows.append(
            {"image": {"bytes": data, "path": None}, "prompt": "which colour" + "?" * (number % 4), "completion": name}
        )
    Features, Value = datasets.Features, datasets.Value  # noqa: N806
    features = Features({"image": datasets.Image(), "prompt": Value("string"), "completion": Value("string")})
    datasets.Dataset.from_list(rows, features=features).to_parquet("talk.parquet")
    (tmp_path / "run.toml").write_text(CONFIG)


def learnt(task: Any, row: int = 0) -> bytes:
    batch = task.train.micro_batch([Draw(row, 0)])
    return b"".join(bytes([label]) if label < 256 else b"|" for label in batch.labels[0].tolist() if label != IGNORED)


def test_replies_are_learnt_and_pictures_are_tokens(tmp_path: Path) -> None:
    config = configured(tmp_path, "data.eval_fraction=0")
    assert config.model.task == "image-text-to-text"
    task = load_task(config)
    assert learnt(task) == b"red|"
    batch = task.train.micro_batch([Draw(1, 0), Draw(99, 1), Draw(3, 2)])
    assert batch.inputs["pixel_values"].shape == (3, 3, 16, 16)
    assert (batch.inputs["input_ids"] == 259).sum(axis=1).tolist() == [4, 4, 4]
    assert (batch.labels[1] == IGNORED).all()
    assert batch.targets == len(b"green|red|")


def test_messages_of_several_turns(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(0)[0])
    said = [("user", "what?"), ("assistant", "red"), ("user", "sure?"), ("assistant", "yes")]
    messages = [{"role": role, "content": text} for role, text in said]
    rows = [{"images": ["a.png"], "messages": messages}] * 2
    Path("turns.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert learnt(load_task(configured(tmp_path, "data.source=turns.jsonl", "data.eval_fraction=0"))) == b"red|yes|"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"image": None, "prompt": "a", "completion": "b"}, "bad.jsonl:1 and all other rows: no picture"),
        ({"image": "a.png", "prompt": "a"}, "bad.jsonl:1: a row needs a picture"),
        ({"image": "a.png", "messages": [{"role": "user", "content": "a"}]}, "has no assistant message"),
    ],
)
def test_rows_of_another_kind_are_named(row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    Path("bad.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=re.escape(reason)):
        load_task(configured(tmp_path, "data.source=bad.jsonl", "data.eval_fraction=0"))
    inline = "model.task=image-text-to-text"
    with pytest.raises(ConfigError, match=r"needs a model.path with a processor"):
        load_task(
            configured(tmp_path, "model.path=none", "model.weights=path", 'model.config={model_type="llava"}', inline)
        )


def with_texts() -> str:
    """Write rows of which every second pair has no picture. Returns the option that reads them."""
    table = datasets.Dataset.from_parquet("talk.parquet").cast_column("image", datasets.Image(decode=False))
    rows = [row | ({"image": None} if number // 2 % 2 else {}) for number, row in enumerate(table)]
    datasets.Dataset.from_list(rows, features=table.features).to_parquet("mixed.parquet")
    return "data.source=mixed.parquet"


def test_rows_without_a_picture(tmp_path: Path) -> None:
    task = load_task(configured(tmp_path, "data.eval_fraction=0", with_texts()))
    mixed = task.train.micro_batch([Draw(1, 0), Draw(2, 1)])
    assert (mixed.inputs["input_ids"] == 259).sum(axis=1).tolist() == [4, 0]
    assert mixed.inputs["pixel_values"].shape[0] == 1
    texts = task.train.micro_batch([Draw(2, 0), Draw(3, 1)])
    assert (texts.inputs["input_ids"] == 259).sum(axis=1).tolist() == [0, 0, 4]
    assert (texts.labels[2] == IGNORED).all()
    assert texts.targets == len(b"blue|red|")


@pytest.mark.slow
def test_ranks_without_pictures_learn_what_one_process_learns(tmp_path: Path, ranks: RankPools) -> None:
    """On some of them the layers that see run only for a row of which nothing is learnt."""
    mixed = (with_texts(), "train.micro_batch=1", "train.steps=6")
    ranks(2).run(train, str(tmp_path), *mixed)
    _, expected, evaluation = unsharded(configured(tmp_path, *mixed))
    assert losses(tmp_path / "runs" / "run") == pytest.approx(expected, rel=1e-3)
    assert lines(tmp_path / "runs" / "run" / "evaluations.jsonl")[-1]["tokens"] == evaluation.targets


@pytest.mark.slow
def test_ranks_learn_what_one_process_learns(tmp_path: Path, ranks: RankPools) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    frozen = 'model.freeze=["model.vision_tower.*"]'
    ranks(2).run(train, str(tmp_path), frozen)
    model, expected, evaluation = unsharded(configured(tmp_path, frozen))
    run = tmp_path / "runs" / "run"
    assert losses(run) == pytest.approx(expected, rel=1e-3)
    found = lines(run / "evaluations.jsonl")[-1]
    assert found["tokens"] == evaluation.targets
    assert found["perplexity"] == pytest.approx(evaluation.metrics["perplexity"], rel=5e-3)
    loaded = AutoModelForImageTextToText.from_pretrained(run / "final").eval()
    assert AutoProcessor.from_pretrained(run / "final").chat_template == TEMPLATE
    batch = load_task(configured(tmp_path)).train.micro_batch([Draw(0, 0), Draw(1, 1)])
    inputs = {name: torch.from_numpy(value) for name, value in batch.inputs.items()}
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits, rtol=5e-3, atol=5e-3)

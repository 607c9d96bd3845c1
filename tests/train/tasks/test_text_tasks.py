"""Tagging, masked words and texts from texts: each on ranks as in one process, and from its files."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.cli.app import run as command
from shardwise.errors import ConfigError
from shardwise.toml_text import toml_value
from shardwise.train.data.batches import Batches, EvaluationBatches, Share
from shardwise.train.data.micro_batch import IGNORED, Draw, MicroBatch
from shardwise.train.data.questions import read_questions
from shardwise.train.tasks.examples import Examples
from shardwise.train.tasks.loading import load_task
from shardwise.train.tasks.objectives import Entities, tags_objective
from tests.ranks import RankPools
from tests.train.tasks.rig import BERT, RUN, configured, lines, losses, train, unsharded

datasets = pytest.importorskip("datasets")

T5 = """
[model.config]
model_type = "t5"
d_model = 32
d_ff = 64
d_kv = 16
num_layers = 2
num_heads = 2
dropout_rate = 0.0
"""
REST = f"""
[data]
source = "rows.jsonl"
seq_len = 48
eval_fraction = 0.2
{RUN.format(steps=6, more="")}
"""
NAMES = ["O", "B-PLACE", "I-PLACE", "B-NAME"]


def tagged(rows: int) -> list[dict[str, Any]]:
    """Return sentences of different lengths, with a name or none, and a place of two words or none."""
    made = []
    for row in range(rows):
        tokens, tags = ["so", " it", " is"][: 1 + row % 3], [0, 0, 0][: 1 + row % 3]
        if row % 2:
            tokens, tags = [*tokens, " Ann"], [*tags, 3]
        if row % 3:
            tokens, tags = [*tokens, " New", " York"], [*tags, 1, 2]
        made.append({"tokens": tokens, "ner_tags": tags})
    return made


def texts(rows: int) -> list[dict[str, Any]]:
    return [{"text": "the quick brown fox " * (1 + row % 5), "summary": f"fox {row % 3}"} for row in range(rows)]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(tmp_path: Path, task: str, model: str = BERT) -> None:
    (tmp_path / "run.toml").write_text(f'{model}\n[model]\ntask = "{task}"\n{REST}')
    if task == "token-classification":
        tags = datasets.List(datasets.ClassLabel(names=NAMES))
        features = datasets.Features({"tokens": datasets.List(datasets.Value("string")), "ner_tags": tags})
        datasets.Dataset.from_list(tagged(31), features=features).to_parquet("rows.parquet")
        (tmp_path / "run.toml").write_text((tmp_path / "run.toml").read_text().replace("rows.jsonl", "rows.parquet"))
    else:
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts(31)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "model", "metrics"),
    [
        ("token-classification", BERT, {"accuracy", "f1"}),
        ("masked-lm", BERT, {"accuracy", "perplexity"}),
        ("seq2seq-lm", T5, {"accuracy", "perplexity"}),
    ],
)
def test_ranks_learn_what_one_process_learns(
    task: str, model: str, metrics: set[str], tmp_path: Path, ranks: RankPools
) -> None:
    import transformers

    from shardwise.train.config.tasks import KINDS

    written(tmp_path, task, model)
    printed = ranks(2).run(train, str(tmp_path))[0]
    alone, expected, evaluation = unsharded(configured(tmp_path))
    run = tmp_path / "runs" / "run"
    assert losses(run) == pytest.approx(expected, rel=1e-3, abs=1e-4)
    found = lines(run / "evaluations.jsonl")[-1]
    assert found.keys() == {"step", "loss", "tokens", *metrics}
    assert found["tokens"] == evaluation.targets
    assert found["loss"] == pytest.approx(evaluation.loss, rel=2e-3)
    loaded = getattr(transformers, KINDS[task].auto).from_pretrained(run / "final").eval()  # type: ignore[index]
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "final")
    batch = dict(tokenizer(["so it is New York", "the fox"], padding=True, return_tensors="pt"))
    batch.pop("token_type_ids", None)
    if task == "seq2seq-lm":
        batch["labels"] = tokenizer(["a", "b"], return_tensors="pt")["input_ids"]
        assert "a sample" in printed
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits, alone(**batch).logits, rtol=5e-3, atol=5e-3)
    if task == "token-classification":
        assert loaded.config.id2label == dict(enumerate(NAMES))


@pytest.mark.parametrize(("task", "model"), [("masked-lm", BERT), ("seq2seq-lm", T5)])
def test_a_run_goes_on_with_the_same_rows_on_other_ranks(
    task: str, model: str, tmp_path: Path, ranks: RankPools
) -> None:
    written(tmp_path, task, model)
    steps = ("checkpoint.every=3", "train.schedule=constant", "data.eval_fraction=0")
    train(str(tmp_path), *steps, "log.name=whole")
    ranks(2).run(train, str(tmp_path), *steps, "train.steps=3", "log.name=parts")
    train(str(tmp_path), *steps, "log.name=parts")
    whole, parts = (losses(tmp_path / "runs" / name) for name in ("whole", "parts"))
    assert parts == pytest.approx(whole, rel=1e-4)


SOURCES = """
[[data.sources]]
source = "a.parquet"
weight = 3.0
[[data.sources]]
source = "z.parquet"
"""


def two_sources(tmp_path: Path, task: str, model: str) -> None:
    """Write a source of rows of a, and one of fewer rows of z, which are drawn 3 to 1."""
    made = {"a": 40, "z": 12}
    for letter, count in made.items():
        texts = [letter * (3 + row % 5) for row in range(count)]
        labels = [["no", "yes"][row % 2] for row in range(count)]
        rows = {"text": texts, "label": labels, "target": texts, "tokens": [[text] for text in texts]}
        rows["tags"] = [[label] for label in labels]
        datasets.Dataset.from_dict(rows).to_parquet(f"{letter}.parquet")
    run = f'{model}\n[model]\ntask = "{task}"\n{REST}'.replace('source = "rows.jsonl"', "") + SOURCES
    (tmp_path / "run.toml").write_text(run)


@pytest.mark.parametrize(
    ("task", "model"),
    [("sequence-classification", BERT), ("token-classification", BERT), ("masked-lm", BERT), ("seq2seq-lm", T5)],
)
def test_several_sources_are_drawn_from_by_weight(task: str, model: str, tmp_path: Path) -> None:
    two_sources(tmp_path, task, model)
    config = configured(tmp_path)
    found = load_task(config)

    def letters(batches: Iterable[MicroBatch]) -> Counter[str]:
        ids = [row for micro in batches for row in micro.inputs["input_ids"].tolist()]
        return Counter("a" if row.count(ord("a")) > row.count(ord("z")) else "z" for row in ids)

    assert isinstance(found.train, Examples)
    assert [part.weight for part in found.train.parts] == [3, 1]
    assert sum(part.rows for part in found.train.parts) == len(found.train)
    whole = letters(Batches(found.train, Share(0, 1, 4), 80, 0).batch(0))
    assert abs(whole["a"] - 60) <= 2
    assert letters(EvaluationBatches(found.held_out, Share(0, 1, 1))).keys() == {"a", "z"}
    assert "  z.parquet: " in found.says[2]
    assert found.says[2].endswith("25.0% of those that are drawn")
    other = [one.model_copy(update={"weight": 1.0}) for one in config.data.each_source]
    even = config.model_copy(update={"data": config.data.model_copy(update={"sources": other})})
    assert str(load_task(even)) != str(found)


def test_questions_are_not_those_of_several_sources(tmp_path: Path) -> None:
    two_sources(tmp_path, "seq2seq-lm", T5)
    Path("asked.jsonl").write_text('{"text": "q", "target": "t"}\n')
    (asked,) = read_questions(configured(tmp_path, "eval.generate=asked.jsonl"))
    assert (asked.prompt, asked.reference) == ("q", "t")


@pytest.mark.slow
def test_a_run_on_several_sources_goes_on_at_another_number_of_ranks(tmp_path: Path, ranks: RankPools) -> None:
    two_sources(tmp_path, "masked-lm", BERT)
    steps = ("checkpoint.every=3", "train.schedule=constant", "data.eval_fraction=0")
    train(str(tmp_path), *steps, "log.name=whole")
    ranks(2).run(train, str(tmp_path), *steps, "train.steps=3", "log.name=parts")
    train(str(tmp_path), *steps, "log.name=parts")
    whole, parts = (losses(tmp_path / "runs" / name) for name in ("whole", "parts"))
    assert parts == pytest.approx(whole, rel=1e-4)


def test_sources_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    two_sources(tmp_path, "sequence-classification", BERT)
    datasets.Dataset.from_dict({"text": ["z", "zz"], "label": [0, 1]}).to_parquet("z.parquet")
    with pytest.raises(ConfigError, match=r"data\.source='a\.parquet, z\.parquet': not all have the same columns"):
        load_task(configured(tmp_path))
    datasets.Dataset.from_dict({"text": ["z"], "label": ["no"]}).to_parquet("z.parquet")
    with pytest.raises(ConfigError, match=r"only one example \(z\.parquet:1\)"):
        load_task(configured(tmp_path))
    Path("z.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"data\.source='z\.parquet' has no rows"):
        load_task(configured(tmp_path))


def test_a_decoder_that_looks_for_a_rows_last_token_takes_rows_that_fill_up_a_batch(tmp_path: Path) -> None:
    sizes = {f"{part}_{what}": value for part in ("encoder", "decoder") for what, value in
             {"layers": 1, "attention_heads": 2, "ffn_dim": 32}.items()}  # fmt: skip
    written(tmp_path, "seq2seq-lm", f"[model]\nconfig = {toml_value({'model_type': 'mbart', 'd_model': 16, **sizes})}")
    run = (tmp_path / "run.toml").read_text().replace("\n[model]\ntask", "\ntask")
    (tmp_path / "run.toml").write_text(run)
    given = ("train.steps=1", "train.micro_batch=4", "train.global_batch=4", "data.eval_fraction=0.3")
    assert len(load_task(configured(tmp_path, *given)).held_out) % 4
    train(str(tmp_path), *given)
    assert lines(tmp_path / "runs/run/evaluations.jsonl")[-1]["loss"] > 0


def test_a_tag_is_that_of_a_words_first_token(tmp_path: Path) -> None:
    written(tmp_path, "token-classification")
    task = load_task(configured(tmp_path, "data.eval_fraction=0"))
    batch = task.train.micro_batch([Draw(1, 0), Draw(99, 1)])
    ids = batch.inputs["input_ids"][0].tolist()
    assert bytes(ids[: batch.targets * 2 + 9]).startswith(b"so it Ann New York")
    assert [label for label in batch.labels[0].tolist() if label != IGNORED] == [0, 0, 3, 1, 2]
    assert batch.labels[0].tolist()[:3] == [0, IGNORED, 0]
    assert (batch.labels[1] == IGNORED).all()  # a row that only fills up the batch


def test_entities_are_counted_whole() -> None:
    objective = tags_objective(tuple(NAMES))
    assert isinstance(objective, Entities)
    targets = torch.tensor([[1, 2, 0, 3, IGNORED], [2, 2, 3, 0, 0]])
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 0, 0, 3, 1], [2, 2, 3, 0, 1]]), 4).float()
    # To be found: a place of two words and a name; a place that has no B, and a name. Found: half of the first place.
    assert objective.scores(logits, targets).tolist() == [9, 7, 3, 5, 4]
    assert objective.metrics(0.0, [9, 7, 3, 5, 4]) == {"accuracy": 7 / 9, "f1": pytest.approx(2 * 3 / 9)}
    assert not isinstance(tags_objective(("NOUN", "VERB")), Entities)


def test_what_is_hidden_depends_on_the_draw_alone(tmp_path: Path) -> None:
    written(tmp_path, "masked-lm")
    rows = load_task(configured(tmp_path)).train
    both, one = rows.micro_batch([Draw(3, 7), Draw(1, 8)]), rows.micro_batch([Draw(1, 8)])
    width = one.labels.shape[1]
    assert (both.labels[1, :width] == one.labels[0]).all()
    assert (both.inputs["input_ids"][1, :width] == one.inputs["input_ids"][0]).all()
    later = rows.micro_batch([Draw(1, 9)])
    assert (later.labels != one.labels).any()
    for batch in (both, one, later):
        hidden = batch.labels != IGNORED
        assert hidden.any(axis=1).all()
        assert batch.targets == hidden.sum()
        assert hidden.mean() < 0.5


def test_long_texts_become_several_rows_and_nothing_is_lost(tmp_path: Path) -> None:
    written(tmp_path, "masked-lm")
    Path("long.txt").write_text("".join(chr(97 + i % 26) for i in range(1000)))
    task = load_task(configured(tmp_path, "data.source=long.txt"))
    ids = np.concatenate([row["input_ids"] for row in [*task.train.encoded, *task.held_out.encoded]])  # type: ignore[attr-defined]
    assert bytes(ids.tolist()).decode() == Path("long.txt").read_text()


def test_the_tuned_model_writes_and_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a run of a task wrote is what `generate` and `plan` read."""
    written(tmp_path, "seq2seq-lm", T5.replace("[model.config]", "[model.config]\nvocab_size = 320"))
    train(str(tmp_path), "train.steps=1")
    assert command(["generate", "runs/run/final", "--prompt", "the fox", "--max-new-tokens", "4"]) == 0
    assert command(["plan", "--from", "run.toml", "--gpu", "cpu", "--gpus", "2", "--quick"]) == 0
    assert "t5 configuration" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "row", "reason"),
    [
        (
            "token-classification",
            {"tokens": ["a"], "tags": [0, 1]},
            "rows.jsonl:1: tokens and tags must be lists",
        ),
        ("seq2seq-lm", {"text": "a"}, "rows need target or summary or completion; these have text"),
        ("masked-lm", {"prompt": "a", "completion": "b"}, "masked-lm reads rows of text, not of conversations"),
    ],
)
def test_rows_of_another_kind_are_named(task: str, row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    written(tmp_path, task)
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=re.escape(reason)):
        load_task(configured(tmp_path, "data.source=rows.jsonl", "data.eval_fraction=0"))
    with pytest.raises(ConfigError, match=f"data.document_mask is for causal language models, not for {task}"):
        load_task(configured(tmp_path, "data.document_mask=true"))

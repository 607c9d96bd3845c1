"""Sequence classification from a table of `datasets` to a model that answers as it was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.train.tasks.loading import load_task
from tests.ranks import RankPools
from tests.train.tasks.rig import BERT, RUN, configured, lines, losses, sentences, train, unsharded

datasets = pytest.importorskip("datasets")

CONFIG = f"""{BERT}
[model]
task = "sequence-classification"
[data]
source = "animals.parquet"
seq_len = 32
eval_fraction = 0.2
{RUN.format(steps=20, more="eval_every = 10")}
[parallel]
units = ["BertLayer"]
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.Dataset.from_list(sentences(61)).to_parquet(str(tmp_path / "animals.parquet"))
    (tmp_path / "run.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_ranks_learn_what_one_process_learns_and_final_answers_alike(tmp_path: Path, ranks: RankPools) -> None:
    """The held-out rows do not fill the last batches, so one rank evaluates one without targets."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    printed = ranks(2).run(train, str(tmp_path))[0]
    config = configured(tmp_path)
    model, expected, evaluation = unsharded(config)
    run = tmp_path / "runs" / "run"
    assert losses(run) == pytest.approx(expected, rel=2e-4, abs=2e-5)
    found = lines(run / "evaluations.jsonl")[-1]
    assert found == {
        "step": 20,
        "loss": pytest.approx(evaluation.loss, rel=1e-3, abs=1e-4),
        "rows": evaluation.targets,
        **{name: pytest.approx(value) for name, value in evaluation.metrics.items()},
    }
    assert found["accuracy"] > 0.9
    assert found["f1"] > 0.9
    assert "with 3 labels: cat, dog, owl" in printed

    loaded = AutoModelForSequenceClassification.from_pretrained(run / "final").eval()
    assert loaded.config.id2label == {0: "cat", 1: "dog", 2: "owl"}
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    batch = tokenizer(["barks", "hoots flies"], padding=True, return_tensors="pt")
    with torch.no_grad():
        ours, theirs = model(**batch).logits, loaded(**batch).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3)
    assert [loaded.config.id2label[at] for at in theirs.argmax(-1).tolist()] == ["dog", "owl"]


def test_a_run_goes_on_with_the_same_rows_on_other_ranks(tmp_path: Path, ranks: RankPools) -> None:
    steps = ("train.steps=6", "checkpoint.every=3", "train.schedule=constant", "train.eval_every=0")
    train(str(tmp_path), *steps, "log.name=whole")
    ranks(2).run(train, str(tmp_path), *steps, "train.steps=3", "log.name=parts")
    train(str(tmp_path), *steps, "log.name=parts")
    whole, parts = (losses(tmp_path / "runs" / name) for name in ("whole", "parts"))
    assert parts == pytest.approx(whole, rel=1e-4)
    ids = json.loads((tmp_path / "runs/parts/checkpoints/step-000006/config.json").read_text())["label2id"]
    assert ids == {"cat": 0, "dog": 1, "owl": 2}


def test_a_trained_model_goes_on_with_its_own_labels(tmp_path: Path) -> None:
    """A fine-tuned directory's task, order of labels and head are taken from it."""
    train(str(tmp_path), "train.steps=2", "train.eval_every=0")
    (tmp_path / "two.jsonl").write_text(
        "".join(
            json.dumps({"text": "it " + word, "label": label}) + "\n"
            for word, label in [("hoots", "owl"), ("mews", "cat")] * 8
        )
    )
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "runs/run/final"\n[data]\nsource = "two.jsonl"\n'
        '[train]\nsteps = 1\nmicro_batch = 4\n[log]\nname = "next"\n'
    )
    config = configured(tmp_path)
    assert config.model.task == "sequence-classification"
    assert load_task(config).shape.labels == ("cat", "dog", "owl")
    train(str(tmp_path))
    (tmp_path / "four.csv").write_text("text,label\n" + "".join(f"it,{label}\n" for label in "abcd"))
    with pytest.raises(ConfigError, match=r"head has 3 labels \(cat, dog, owl\), and label has 4 \(a, b, c, d\)"):
        load_task(configured(tmp_path, "data.source=four.csv"))


def rows(*values: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"text": f"row {number}", "label": value, **more} for number, value in enumerate(values)]


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (rows(0, 1, 2, 1), ("LABEL_0", "LABEL_1", "LABEL_2")),
        (rows(True, False, True), ("LABEL_0", "LABEL_1")),
        (rows("no", "yes", "maybe"), ("maybe", "no", "yes")),
    ],
)
def test_labels_are_numbers_or_names(made: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    datasets.Dataset.from_list(made).to_json("some.jsonl")
    assert load_task(configured(Path(), "data.source=some.jsonl")).shape.labels == names


def test_names_of_a_class_label_keep_their_order() -> None:
    label = datasets.ClassLabel(names=["zebra", "ant"])
    features = datasets.Features({"text": datasets.Value("string"), "label": label})
    datasets.Dataset.from_list(rows(0, 1, 1, 0), features=features).save_to_disk("saved")
    task = load_task(configured(Path(), "data.source=saved"))
    assert task.shape.labels == ("zebra", "ant")


def test_two_texts_are_a_pair() -> None:
    made = [{"premise": "a cat", "hypothesis": f"an animal {i}", "label": i % 2} for i in range(6)]
    datasets.Dataset.from_list(made).to_json("pairs.jsonl")
    task = load_task(configured(Path(), "data.source=pairs.jsonl"))
    first = task.train.micro_batch([*task_draws(1)])
    assert bytes(first.inputs["input_ids"][0].tolist()).startswith(b"a cat")


def task_draws(count: int) -> list[Any]:
    from shardwise.train.data.micro_batch import Draw

    return [Draw(row, row) for row in range(count)]


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ([{"words": "a", "label": 1}], "rows need text or sentence; these have words, label"),
        ([{"text": "a"}] * 3, "rows need label or labels; these have text"),
        (rows(0.5, 1.5), "regression and several labels for one row are not supported"),
        (rows(-3, 1), "not such as -3"),
        (rows("a", "a"), "has one label only"),
        (rows("a", None, "b"), r"label must hold labels"),
        ([{"text": None, "label": 1}, {"text": "b", "label": 0}], "bad.jsonl:1: text must be text"),
    ],
)
def test_rows_of_another_kind_are_named(made: list[dict[str, Any]], reason: str) -> None:
    Path("bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    with pytest.raises(ConfigError, match=reason) as caught:
        load_task(configured(Path(), "data.source=bad.jsonl", "data.eval_fraction=0"))
    assert "\n" not in str(caught.value)


def test_plain_text_and_other_types_of_models_are_refused(tmp_path: Path) -> None:
    Path("plain.txt").write_text("no rows here")
    for source in ("plain.txt", "builtin:python-stdlib"):
        with pytest.raises(ConfigError, match="is plain text, but this task needs rows with a text and a label"):
            load_task(configured(Path(), f"data.source={source}"))
    with pytest.raises(ConfigError, match=r"no such model of the type 'vit'; set model.task to one .* has: image-cl"):
        train(str(tmp_path), 'model.config={model_type = "vit"}')


def test_frozen_parameters_stay(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    still = ("train.steps=2", "train.eval_every=0", "train.weight_decay=0.5", "checkpoint.every=1")
    train(str(tmp_path), *still, 'model.freeze=["bert.embeddings.*", "bert.encoder.layer.0.*"]')
    first, second = (load_file(tmp_path / f"runs/run/checkpoints/step-00000{n}/model.safetensors") for n in (1, 2))
    changed = {name for name in first if not torch.equal(first[name], second[name])}
    assert not any(name.startswith(("bert.embeddings.", "bert.encoder.layer.0.")) for name in changed)
    assert any(name.startswith("bert.encoder.layer.1.") for name in changed)
    with pytest.raises(ConfigError, match=r"model.freeze: 'bert.embedings.\*' matches no parameter"):
        train(str(tmp_path), 'model.freeze=["bert.embedings.*"]', "log.name=typo")

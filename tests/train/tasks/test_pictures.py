"""Classified pictures, from bytes in a table, from paths and from folders."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.train.config.schema import ModelConfig
from shardwise.train.data.batches import Batches, Share
from shardwise.train.data.micro_batch import IGNORED, Draw
from shardwise.train.tasks.loading import load_task
from shardwise.train.tasks.pictures import image_processor
from tests.ranks import RankPools
from tests.train.tasks.rig import RUN, configured, lines, losses, picture, train, unsharded

datasets = pytest.importorskip("datasets")
images = pytest.importorskip("PIL.Image")

CONFIG = f"""
[model.config]
model_type = "vit"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
image_size = 16
patch_size = 8
[model]
task = "image-classification"
[data]
source = "pictures.parquet"
eval_fraction = 0.25
{RUN.format(steps=10, more="")}
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"image": {"bytes": data, "path": None}, "label": name} for data, name in map(picture, range(43))]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    datasets.Dataset.from_list(rows, features=features).to_parquet("pictures.parquet")
    (tmp_path / "run.toml").write_text(CONFIG)


@pytest.mark.slow
def test_ranks_learn_what_one_process_learns_and_final_sees_alike(tmp_path: Path, ranks: RankPools) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    assert " rows/s" in ranks(2).run(train, str(tmp_path))[0]
    model, expected, evaluation = unsharded(configured(tmp_path))
    run = tmp_path / "runs" / "run"
    assert losses(run) == pytest.approx(expected, rel=1e-3, abs=1e-4)
    found = lines(run / "evaluations.jsonl")[-1]
    assert found["rows"] == evaluation.targets
    assert found["loss"] == pytest.approx(evaluation.loss, rel=1e-2, abs=1e-3)
    assert found["accuracy"] == found["f1"] == 1.0
    loaded = AutoModelForImageClassification.from_pretrained(run / "final").eval()
    assert loaded.config.id2label == {0: "blue", 1: "green", 2: "red"}
    processor = AutoImageProcessor.from_pretrained(run / "final")
    shown = [images.open(io.BytesIO(picture(number)[0])) for number in range(100, 103)]
    batch = processor(images=shown, return_tensors="pt")
    with torch.no_grad():
        ours, theirs = model(**batch).logits, loaded(**batch).logits
    torch.testing.assert_close(theirs, ours, rtol=5e-3, atol=5e-3)
    assert [loaded.config.id2label[at] for at in theirs.argmax(-1).tolist()] == [picture(n)[1] for n in range(100, 103)]


def test_paths_and_folders_are_the_same_pictures(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    rows = []
    for number in range(9):
        data, name = picture(number)
        for file in (tmp_path / f"there/{number}.png", tmp_path / f"folders/{name}/{number}.png"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        rows.append({"image": f"{number}.png", "label": name})
    (tmp_path / "there/rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = load_task(configured(tmp_path, "data.source=there/rows.jsonl", "data.eval_fraction=0"))
    folders = load_task(configured(tmp_path, "data.source=folders", "data.eval_fraction=0"))
    assert named.shape.labels == folders.shape.labels == ("blue", "green", "red")
    by_label = {}
    for task in (named, folders):
        batch = task.train.micro_batch([Draw(row, row) for row in range(9)])
        assert batch.inputs["pixel_values"].shape == (9, 3, 16, 16)
        assert batch.size == batch.targets == 9
        sums = batch.inputs["pixel_values"].sum(axis=(1, 2, 3)).tolist()
        by_label[task] = sorted(zip(batch.labels.tolist(), sums, strict=True))
    assert by_label[named] == by_label[folders]
    assert named.train.digest != folders.train.digest  # another order
    filled = named.train.micro_batch([Draw(8, 0), Draw(9, 1)])
    assert filled.labels[1] == IGNORED
    assert filled.targets == 1


def test_several_sources_are_drawn_from_by_weight(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_parquet("pictures.parquet")
    rows.filter(lambda row: row["label"] == "red").to_parquet("red.parquet")
    rows.filter(lambda row: row["label"] != "red").to_parquet("others.parquet")
    sources = '[[data.sources]]\nsource = "red.parquet"\nweight = 4.0\n[[data.sources]]\nsource = "others.parquet"\n'
    (tmp_path / "run.toml").write_text(CONFIG.replace('source = "pictures.parquet"\n', "") + sources)
    task = load_task(configured(tmp_path))
    drawn = Batches(task.train, Share(0, 1, 4), 80, 0).batch(0)
    labels = [task.shape.labels[label] for micro in drawn for label in micro.labels.tolist()]
    assert abs(labels.count("red") - 64) <= 2
    assert {"red", "blue"} < set(labels)


@pytest.mark.parametrize(
    ("kind", "name"), [("vit", "height"), ("convnext", "shortest_edge"), ("dinov2", "shortest_edge")]
)
def test_a_type_without_files_has_its_processor_with_the_models_size(kind: str, name: str) -> None:
    found = image_processor(ModelConfig(config={"model_type": kind, "image_size": 28}))
    assert getattr(found.size, name) == 28
    assert found.crop_size is None or found.crop_size.height == 28


def test_what_is_no_picture_is_named(tmp_path: Path) -> None:
    (tmp_path / "no.png").write_bytes(b"none")
    (tmp_path / "bad.jsonl").write_text(
        '{"image": "no.png", "label": 0}\n{"image": "gone.png", "label": 1}\n{"image": "no.png", "label": 1}\n'
    )
    with pytest.raises(ConfigError, match=r"bad.jsonl:2: gone.png cannot be read: No such file"):
        train(str(tmp_path), "data.source=bad.jsonl")
    Path("bad.jsonl").write_text('{"image": "no.png", "label": 0}\n{"image": "no.png", "label": 1}\n')
    task = load_task(configured(tmp_path, "data.source=bad.jsonl", "data.eval_fraction=0"))
    with pytest.raises(ConfigError, match=r"bad.jsonl:1: not a picture that can be read"):
        task.train.micro_batch([Draw(0, 0)])
    Path("none.jsonl").write_text('{"image": "no.png", "label": 0}\n{"image": null, "label": 1}\n')
    with pytest.raises(ConfigError, match=r"none.jsonl:2: has no picture, and a label belongs to one"):
        load_task(configured(tmp_path, "data.source=none.jsonl", "data.eval_fraction=0"))
    with pytest.raises(ConfigError, match="no image processor for the type 'bert'"):
        load_task(configured(tmp_path, 'model.config={model_type = "bert"}'))


def test_a_trained_classifier_needs_no_tokenizer(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=3)).save_pretrained("vit")
    config = configured(tmp_path, "model.config=none", "model.path=vit", "model.task=none")
    assert config.model.task == "image-classification"
    assert load_task(config).train.micro_batch([Draw(0, 0)]).inputs["pixel_values"].shape == (1, 3, 16, 16)

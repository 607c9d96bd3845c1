"""CHECKPOINT, as `shardwise generate` and `export` take it: which directories it means."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardwise as sw
from shardwise.checkpoint.interchange.model_directories import find_model
from shardwise.errors import UserError
from tests.hub import cached

CONFIG = {"config.json": b"{}"}


def hugging_face(directory: Path) -> Path:
    directory.mkdir(parents=True)
    save_file({"weight": torch.ones(2)}, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    return directory


def adapter(directory: Path, base: Path | str) -> Path:
    directory.mkdir(parents=True)
    save_file({"base_model.model.weight.lora_A.weight": torch.ones(1, 2)}, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    return directory


def step(run: Path, number: int) -> Path:
    path = run / "checkpoints" / f"step-{number:06d}"
    sw.checkpoint.save(path, sw.shard(nn.Linear(2, 2)), step=number, files=CONFIG)
    return path


def test_a_run_is_its_final_model_else_its_newest_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, second = step(run, 2), step(run, 10)
    assert find_model(str(first)).weights == first
    assert find_model(str(run)).weights == second
    assert find_model(str(run)).adapter is None
    hugging_face(run / "final")
    assert find_model(str(run)).weights == find_model(str(run / "final")).weights == run / "final"


def test_steps_that_lie_in_the_directory_itself(tmp_path: Path) -> None:
    """As the Trainer of transformers writes them, beside a model of its own at the end."""
    sw.checkpoint.save(tmp_path / "checkpoint-3", sw.shard(nn.Linear(2, 2)), step=3, files=CONFIG)
    assert find_model(str(tmp_path)).weights == tmp_path / "checkpoint-3"
    (tmp_path / "config.json").write_text("{}")
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert find_model(str(tmp_path)).weights == tmp_path


def test_an_adapter_has_a_base(tmp_path: Path) -> None:
    base = hugging_face(tmp_path / "base")
    found = find_model(str(adapter(tmp_path / "run" / "final", base)))
    assert (found.weights, found.adapter, found.tokenizer) == (base, tmp_path / "run" / "final", None)
    assert find_model(str(tmp_path / "run")) == found
    (base / "tokenizer.json").write_text("{}")
    assert found.tokenizer == base
    (tmp_path / "run" / "final" / "tokenizer.json").write_text("{}")
    assert found.tokenizer == tmp_path / "run" / "final"
    shutil.move(base, tmp_path / "elsewhere")
    assert find_model(str(tmp_path / "run"), base=str(tmp_path / "elsewhere")).weights == tmp_path / "elsewhere"
    with pytest.raises(UserError, match=r"names the base .*: give the directory of its base with --base"):
        find_model(str(tmp_path / "run"))
    with pytest.raises(UserError, match="not a PEFT adapter, and only those have a base: leave --base x out"):
        find_model(str(tmp_path / "elsewhere"), base="x")


def test_names_of_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    pinned = cached.put(hugging_face(tmp_path / "base"), "org/base", tmp_path / "cache", monkeypatch)
    adapted = cached.put(adapter(tmp_path / "adapter", pinned), "org/adapter", tmp_path / "cache", monkeypatch)
    base = tmp_path / "cache" / "models--org--base" / "snapshots" / cached.COMMIT
    assert find_model(pinned).weights == find_model(pinned, weights=False).weights == base
    found = find_model(adapted)
    assert found.weights == base
    assert found.adapter == tmp_path / "cache" / "models--org--adapter" / "snapshots" / cached.COMMIT


def test_what_is_not_a_model(tmp_path: Path) -> None:
    hugging_face(tmp_path / "model")
    hugging_face(tmp_path / "weights")
    (tmp_path / "weights" / "config.json").unlink()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    torch.save({}, tmp_path / "whole.pt")
    for text, words in (
        ("modle", "no such checkpoint; did you mean .*model"),
        ("model/nothing/at/all", "no such checkpoint; a model on a hub is named org/name"),
        ("run", "is a run without a checkpoint"),
        ("whole.pt", r"convert it first \(shardwise convert .*whole.pt DIR --to hf"),
        ("run/checkpoints", "is not a checkpoint"),
        ("weights", "weights has no config.json, so it is no model of transformers"),
    ):
        with pytest.raises(UserError, match=words):
            find_model(str(tmp_path / text))
    with pytest.raises(UserError, match="is a URL"):
        find_model("s3://bucket/model")

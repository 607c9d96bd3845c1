"""Which files hold a Hugging Face directory's weights: those that its index names, all of them and no others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardwise as sw
from shardwise.checkpoint import convert, inspect
from shardwise.checkpoint.format.hugging_face import INDEX
from shardwise.checkpoint.interchange.inspection import Inspection
from shardwise.cli.app import run
from shardwise.errors import CheckpointError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write(path: Path, files: Mapping[str, Mapping[str, float]], weight_map: Mapping[str, str] | None) -> Path:
    """A directory of tensors of three equal elements each."""
    path.mkdir()
    for file, tensors in files.items():
        save_file({name: torch.full((3,), value) for name, value in tensors.items()}, path / file)
    if weight_map is not None:
        (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return path


def two_files(path: Path) -> Path:
    return write(path, {FIRST: {"a": 1.0}, SECOND: {"b": 2.0}}, {"a": FIRST, "b": SECOND})


def damage(path: Path) -> tuple[str, ...]:
    found = inspect(path)
    assert isinstance(found, Inspection)
    return found.damage


def test_a_file_that_the_index_names_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = two_files(tmp_path / "hf")
    assert damage(path) == ()
    (path / SECOND).unlink()
    assert damage(path) == (f"{path / SECOND} is missing; {INDEX} names it",)
    assert run(["inspect", str(path)]) == 1
    for target, to in (("x.pt", "pt"), ("x", "dcp"), ("x", "shardwise")):
        with pytest.raises(CheckpointError, match=f"{SECOND} is missing"):
            convert(path, tmp_path / target, to)
    assert not list(tmp_path.glob("x*"))
    (path / INDEX).unlink()  # nobody knows that there were two
    assert run(["inspect", str(path)]) == 2
    assert f"neither model.safetensors nor {INDEX}" in capsys.readouterr().err


def test_other_files_are_none_of_the_model_s(tmp_path: Path) -> None:
    for path in (two_files(tmp_path / "hf"), write(tmp_path / "one", {"model.safetensors": {"a": 1.0}}, None)):
        save_file({"lora": torch.ones(3), "a": torch.zeros(3)}, path / "adapter.safetensors")
        assert damage(path) == ()
        convert(path, tmp_path / f"{path.name}.pt")
        model = torch.load(tmp_path / f"{path.name}.pt")["model"]
        assert {name: value[0].item() for name, value in model.items()} == (
            {"a": 1.0, "b": 2.0} if path.name == "hf" else {"a": 1.0}
        )


def test_the_index_says_which_of_two_is_meant(tmp_path: Path) -> None:
    both = {FIRST: {"weight": 1.0}, SECOND: {"weight": 2.0, "bias": 2.0}}
    for meant, value in ((FIRST, 1.0), (SECOND, 2.0)):
        path = write(tmp_path / meant, both, {"weight": meant, "bias": SECOND})
        model = sw.shard(torch.nn.LayerNorm(3))
        sw.checkpoint.load_pretrained(path, model)
        assert [p.full_tensor()[0].item() for p in model.parameters()] == [value, 2.0]
        convert(path, tmp_path / f"{meant}.own")
        assert load_file(tmp_path / f"{meant}.own" / "model.safetensors")["weight"][0].item() == value
    nobody = write(tmp_path / "nobody", both, {"bias": SECOND, "other": FIRST})
    with pytest.raises(CheckpointError, match=f"{FIRST} has no tensor 'other', but {INDEX} lists it there"):
        sw.checkpoint.load_pretrained(nobody, model)
    (nobody / INDEX).write_text(json.dumps({"weight_map": {"bias": SECOND, "x": FIRST}}).replace("x", "bias2"))
    save_file({"weight": torch.ones(3), "bias2": torch.ones(3)}, nobody / FIRST)
    assert "does not say which one to read" in damage(nobody)[0]


@pytest.mark.parametrize("left", ["training.json", "optimizer.safetensors", "optimizer-00001-of-00002.safetensors"])
def test_a_checkpoint_without_its_manifest_is_none(
    left: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "step-000001", {"model.safetensors": {"weight": 1.0, "bias": 1.0}}, None)
    save_file({"weight.exp_avg": torch.ones(3)}, path / left)
    for command in (["inspect", str(path)], ["convert", str(path), str(tmp_path / "x.pt")]):
        assert run(command) == 2
        assert f"{path} has {left} but no manifest.json, so it is not a" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=f"has {left} but no manifest"):
        sw.checkpoint.load_pretrained(path, sw.shard(torch.nn.LayerNorm(3)))
    assert not (tmp_path / "x.pt").exists()

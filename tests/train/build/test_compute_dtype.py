"""The dtype that a run computes in if its configuration names none."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from shardwise import device_tools
from shardwise.checkpoint.format import training_json
from shardwise.train.build import compute_dtype
from shardwise.train.config.files import load
from shardwise.train.output.checkpoints import Checkpoints
from shardwise.train.process.ranks import Ranks
from shardwise.train.run.directory import RunDirectory
from tests.train.rig import TINY, losses, run_alone

pytest.importorskip("transformers")

XPU = torch.device("xpu", 0)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("the quick brown foxes jump over lazy dogs. " * 90)
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.chdir(tmp_path)


def settled(device: torch.device, *overrides: str, has_bf16: bool = True) -> tuple[str | None, str]:
    with mock.patch.object(device_tools, "computes_in_bf16", return_value=has_bf16 and device.type != "cpu"):
        config = load("tiny.toml", overrides)
        saved = Checkpoints(RunDirectory(config.run_directory).checkpoints, config.checkpoint, Ranks(0, 1, device))
        config, words = compute_dtype.settle(config, device, saved.peek())
    return config.parallel.param_dtype, words


def test_a_new_run_computes_in_bf16_where_its_device_does() -> None:
    assert settled(torch.device("cpu")) == (None, "")
    dtype, words = settled(XPU)
    assert dtype == "bf16"
    assert words == (
        "parameters are gathered and computed with in bf16, the fastest dtype of this device, and updated in "
        "fp32; to change it, set parallel.param_dtype"
    )
    assert settled(XPU, has_bf16=False)[0] == "fp32"
    assert settled(XPU, "model.dtype=fp16")[0] == "fp16"
    for named in ("fp32", "bf16", "fp16"):
        assert settled(XPU, f"parallel.param_dtype={named}") == (named, "")


SAVING = ("checkpoint.every=1", "checkpoint.keep=9", "train.eval_every=0", "data.eval_fraction=0")


def test_a_run_that_goes_on_computes_as_before() -> None:
    run_alone("train.steps=1", "log.name=bf16", "parallel.param_dtype=bf16", *SAVING)
    run_alone("train.steps=1", "log.name=fp32", *SAVING)
    for device in (XPU, torch.device("cpu")):
        going_on = settled(device, "log.name=bf16")
        assert going_on[0] == "bf16"
        assert "in bf16, as in the checkpoint, and updated in fp32" in going_on[1]
        assert settled(device, "checkpoint.resume=runs/bf16/checkpoints/step-000001")[0] == "bf16"
        assert settled(device, "log.name=bf16", "parallel.param_dtype=fp32") == ("fp32", "")
    assert settled(XPU, "log.name=fp32")[0] == "fp32"
    assert settled(torch.device("cpu"), "log.name=fp32") == (None, "")
    assert settled(XPU, "checkpoint.resume=runs/nowhere")[0] == "bf16"  # it is refused later, in its own words
    with mock.patch.object(training_json, "read", return_value={"extra": {"evaluated": True}}):  # an older checkpoint
        assert settled(XPU, "log.name=bf16")[0] == "fp32"


def test_a_run_takes_what_was_settled(capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU that claims to compute in bf16, losses are those of a run whose configuration names bf16."""
    run_alone("log.name=named", "parallel.param_dtype=bf16", "train.steps=2", *SAVING)
    capsys.readouterr()
    with mock.patch.object(device_tools, "computes_in_bf16", return_value=True):
        run_alone("log.name=open", "train.steps=2", *SAVING)
    assert "computed with in bf16, the fastest dtype" in "".join(capsys.readouterr().out.splitlines()[:3])
    assert losses("open") == losses("named")
    assert load("runs/open/config.toml").parallel.param_dtype == "bf16"
    run_alone("log.name=cpu", "train.steps=2", *SAVING)
    assert "computed with" not in capsys.readouterr().out
    assert losses("cpu") != losses("named")
    assert "param_dtype" not in Path("runs/cpu/config.toml").read_text()

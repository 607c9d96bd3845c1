"""`shardwise doctor`: its answer, its exit status, and wrong input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from shardwise.cli.app import run
from shardwise.cli.doctor import _settled, _show, _shrunk, _table
from shardwise.diagnosis.result import Check, Diagnosis, Finding, Status
from shardwise.errors import MeshError
from shardwise.train.config.files import load
from shardwise.train.config.schema import ModelConfig
from tests.train.rig import furnish

OF_THE_MOMENT = {"disk", "pace of ranks", "bandwidth"}
"""Checks that may fail on a machine that does other work too."""
FACTORY = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(300, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 300)

    def forward(self, input_ids):
        return self.head(self.mix(self.embed(input_ids)))

def build():
    model = Net()
    model.mix.bias.requires_grad_(False)
    return model
"""
CONFIG = """
[model]
factory = "nets:build"

[data]
source = "texts.txt"
seq_len = 16

[train]
steps = 5
micro_batch = 2
"""


def _doctor(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    path = os.pathsep.join([str(cwd), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "doctor", *arguments],
        env={**clean, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=250,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_machine_alone_is_diagnosed_as_json(tmp_path: Path) -> None:
    status, out, err = _doctor("--json", "--strategies", "zero2", cwd=tmp_path)
    found = Diagnosis.from_dict(json.loads(out))
    assert {check.name for check in found.failed} <= OF_THE_MOMENT, str(found)
    assert status == (not found.ok)
    assert err == ""
    assert [check.name for check in found.checks if check.strategy == "shard_grad_op"][-1] == "checkpoint"


@pytest.mark.slow
def test_a_configuration_is_diagnosed_as_it_would_train(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(FACTORY)
    (tmp_path / "texts.txt").write_text("some words to learn from. " * 200)
    (tmp_path / "run.toml").write_text(CONFIG)
    status, out, err = _doctor("run.toml", "train.lr=1e-2", cwd=tmp_path)
    assert status == 1, err
    failed = [line for line in out.splitlines() if line.startswith("failed")]
    assert "failed   trainable parameters: mix.bias: is frozen (requires_grad=False): let it train" in failed
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.toml"], "no configuration file at absent.toml"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--strategies", "zero4"], "unknown strategy 'zero4'; did you mean 'zero3'"),
        (["quickstart", "train.lrr=1"], "train.lrr"),
        (["quickstart-jax"], "the doctor looks at torch"),
        (["quickstart", "parallel.backend=jax"], "the doctor looks at torch"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["doctor", *arguments]) == 2
    said = capfd.readouterr().err
    assert message in said
    assert [line for line in said.splitlines() if line.startswith("error: ")] == said.splitlines()[-1:]


def test_a_model_is_shrunk_to_some_of_its_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import Qwen2Config, T5Config

    Qwen2Config(num_hidden_layers=5, hidden_size=8, num_attention_heads=2).save_pretrained(tmp_path / "model")
    t5 = _shrunk(ModelConfig(config={"model_type": "t5", "num_layers": 4, "num_decoder_layers": 3}), 2, tmp_path).config
    assert t5 == {"model_type": "t5", "num_layers": 2, "num_decoder_layers": 2}
    T5Config(num_layers=4, d_model=8, num_heads=2).save_pretrained(tmp_path / "t5")
    path = _shrunk(ModelConfig(path=str(tmp_path / "t5")), 2, tmp_path).path
    shorter = T5Config.from_pretrained(Path(path or "").parent)
    assert (shorter.num_layers, shorter.num_decoder_layers) == (2, 2)
    T5Config(num_layers=1, num_decoder_layers=3, d_model=8, num_heads=2).save_pretrained(tmp_path / "t5")
    path = _shrunk(ModelConfig(path=str(tmp_path / "t5")), 2, tmp_path).path
    shorter = T5Config.from_pretrained(Path(path or "").parent)
    assert (shorter.num_layers, shorter.num_decoder_layers) == (1, 2)
    bart = _shrunk(ModelConfig(config={"model_type": "bart", "encoder_layers": 1}), 2, tmp_path).config
    assert bart == {"model_type": "bart", "encoder_layers": 1, "decoder_layers": 2}
    short = ModelConfig(config={"model_type": "t5", "num_layers": 1})  # so many in the decoder as well
    assert _shrunk(short, 2, tmp_path) == short
    inline = ModelConfig(config={"model_type": "gpt2", "n_layer": 4})
    assert _shrunk(inline, 2, tmp_path).config == {"model_type": "gpt2", "n_layer": 2}
    assert _shrunk(inline, 4, tmp_path) == _shrunk(inline, 0, tmp_path) == inline
    path = _shrunk(ModelConfig(path=str(tmp_path / "model")), 2, tmp_path).path
    assert path is not None
    small = json.loads(Path(path).read_text())
    assert (small["num_hidden_layers"], small["hidden_size"], len(small["layer_types"])) == (2, 8, 2)
    assert "2 layers of" in capsys.readouterr().err


def test_axes_are_left_out_only_if_they_do_not_divide_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    given = ["parallel.tp=2", "train.global_batch=none"]
    alone = _settled(load("tiny.toml", [*given, "parallel.ranks=3"]), 0)
    assert (alone.parallel.tp, alone.parallel.ranks) == (1, 3)
    assert "tp=2 does not divide the 3 ranks" in (said := capsys.readouterr().err)
    assert "the data axes alone are compared" in said
    for overrides, gpus, message in [
        (["parallel.ranks=4"], 2, "this machine has 2 GPUs"),
        (["parallel.ranks=3"], 2, "this machine has 2 GPUs"),
        (["parallel.ranks=4", "parallel.strategy=hybrid_shard", "parallel.shard_group=3"], 0, "parallel.shard_group=3"),
    ]:
        with pytest.raises(MeshError, match=message):
            _settled(load("tiny.toml", [*given, *overrides]), gpus)
    assert not capsys.readouterr().err


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks = [
        Check("devices", Status.PASSED, "2 ranks"),
        Check("loss", Status.FAILED, "blocks.1: differs", "full_shard", (Finding("blocks.1", "differs"),)),
    ]
    (tmp_path / "found.json").write_text(json.dumps(Diagnosis(tuple(checks)).to_dict()))
    assert _show(tmp_path / "found.json", as_json=False) == 1
    assert capsys.readouterr().out.startswith(
        "passed   devices: 2 ranks\nfailed   loss (full_shard): blocks.1: differs\n"
    )
    assert _show(tmp_path / "found.json", as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["checks"][1]["fqn"] == "blocks.1"
    console = Console(file=StringIO(), width=60, force_terminal=False)
    console.print(_table(Diagnosis(tuple(checks))))
    assert "✗ loss    blocks.1: differs" in console.file.getvalue()  # type: ignore[attr-defined]

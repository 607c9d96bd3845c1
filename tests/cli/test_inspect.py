"""The units of a model, seen from one process."""

from pathlib import Path
from unittest import mock

import pytest

from shardwise import device_tools
from shardwise.cli.app import run

TINY = """
[model.config]
model_type = "llama"
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
tie_word_embeddings = true

[train]
steps = 1
"""
BLOCK_NUMEL = 4 * 16 * 16 + 3 * 16 * 32 + 2 * 16


def test_a_strategy_that_is_left_open_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    overrides = ["parallel.ranks=2", "parallel.strategy=auto"]
    assert run(["inspect", str(tmp_path / "tiny.toml"), *overrides]) == 0
    planned, *rows = capsys.readouterr().out.splitlines()
    assert planned.startswith("planned: ")
    assert any(row.startswith("model.layers.1 ") for row in rows)
    assert run(["inspect", str(tmp_path / "tiny.toml"), *overrides, "parallel.hardware=no-such-gpu"]) == 2
    assert "no-such-gpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "shard_numel"),
    [
        (["parallel.ranks=8"], BLOCK_NUMEL // 8),
        (["parallel.ranks=8", "parallel.strategy=hybrid_shard", "parallel.shard_group=4"], BLOCK_NUMEL // 4),
        (["parallel.ranks=8", "parallel.strategy=no_shard"], BLOCK_NUMEL),
    ],
)
def test_units_at_any_number_of_ranks(
    overrides: list[str], shard_numel: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    assert run(["inspect", str(tmp_path / "tiny.toml"), *overrides]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    blocks = [row for row in rows if row[0].startswith("model.layers.")]
    assert [row[0] for row in blocks] == ["model.layers.0", "model.layers.1"]
    for row in blocks:
        assert f"{BLOCK_NUMEL:,}" in row
        assert f"{4 * shard_numel:,}" in row


def test_a_dtype_that_is_left_open_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    command = ["inspect", str(tmp_path / "tiny.toml"), "parallel.ranks=8", f"log.directory={tmp_path}"]
    with mock.patch.object(device_tools, "computes_in_bf16", return_value=True):
        assert run(command) == 0
        said, *rows = capsys.readouterr().out.splitlines()
        assert said.startswith("parameters are gathered and computed with in bf16, the fastest dtype of this device")
        assert run([*command, "parallel.param_dtype=bf16"]) == 0
        assert capsys.readouterr().out.splitlines() == rows
    assert run(command) == 0
    assert capsys.readouterr().out.splitlines() != [said, *rows]


def test_a_finished_run_without_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run" / "final").mkdir(parents=True)
    for name in ("config.toml", "metrics.jsonl"):
        (tmp_path / "run" / name).touch()
    assert run(["inspect", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/run: a run with 0 checkpoints",
        f"finished: `shardwise inspect {tmp_path}/run/final` shows the model",
    ]

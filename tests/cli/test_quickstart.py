"""The recipe that a newcomer runs first, shortened to a few steps, through the command line and its real ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SHORT = ["train.steps=4", "train.warmup_steps=1", "train.eval_every=2", "log.name=short"]
SIZE = r"[\d.]+ (?:B|[KMG]iB)"


@pytest.mark.slow
def test_the_quickstart_trains_samples_and_sums_up(tmp_path: Path) -> None:
    command = "from shardwise.cli.main import main; main()"
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            command,
            "train",
            "quickstart",
            *SHORT,
        ],
        cwd=tmp_path,
        env={**clean, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr

    run = tmp_path / "runs" / "short"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert {step["world_size"] for step in steps} == {2}
    assert 7.2 < steps[0]["loss"] < 8.2  # 1,536 tokens, of which it knows nothing yet
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    held_out = [float(loss) for loss in re.findall(r"held-out loss ([\d.]+)", ended.stdout)]
    assert len(held_out) == 3  # before, between and after
    assert held_out[0] > held_out[1] > held_out[2]

    assert "a sample (what the model wrote follows »)" in ended.stdout
    _check_table(ended.stdout, steps[-1]["memory"])
    assert {"config.json", "model.safetensors"} <= {path.name for path in (run / "final").iterdir()}


def _check_table(shown: str, memory: dict[str, int | None]) -> None:
    """Check the table of bytes by kind on two ranks, beside DDP's, and the quotient of the totals."""
    assert "bytes per rank on 2 ranks" in shown
    assert "full_shard, counted" in shown
    assert "DDP, computed" in shown
    rows = dict(re.findall(rf"(\w+)\W+({SIZE}\W+{SIZE})", shown))
    assert set(rows) == {"param_shards", "gathered_slots", "grad_shards", "reduce_slots", "optimizer", "all"}
    columns = zip(*(re.findall(SIZE, sizes) for sizes in rows.values()), strict=True)
    ours, ddp = (dict(zip(rows, map(_bytes, column), strict=True)) for column in columns)
    for kind in set(rows) - {"all"}:
        assert ours[kind] == pytest.approx(memory[kind], rel=0.02)  # rank 0's; sizes have one decimal
    for kind in ("param_shards", "grad_shards", "optimizer"):
        assert ours[kind] / ddp[kind] == pytest.approx(0.5, abs=0.01)  # of sizes with one decimal
    assert ddp["gathered_slots"] == ddp["reduce_slots"] == 0
    summary = re.search(r"([\d.]+) of DDP's bytes per rank .*; median step ([\d.]+) s, measured", shown)
    assert summary is not None
    assert float(summary[1]) == pytest.approx(ours["all"] / ddp["all"], abs=0.01)
    assert float(summary[2]) > 0


def _bytes(size: str) -> float:
    number, unit = size.split()
    return float(number) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]

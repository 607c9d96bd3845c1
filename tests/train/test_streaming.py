"""Whole runs on data that is read block by block."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from tests.ranks import RankPools
from tests.train.tasks.rig import RUN, lines, losses, train

datasets = pytest.importorskip("datasets")

ROOT = Path(__file__).parents[2]
RUN_FILE = f"""
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2

[data]
source = "rows.parquet"
seq_len = 32
eval_fraction = 0.05
streaming = true
block_mib = 1
{RUN.format(steps=36, more="schedule = 'constant'")}
[checkpoint]
every = 18
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a source of four blocks, which are large for a column that is not read, and have some 70 rows each."""
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"the {row} quick brown foxes " * (1 + row % 4), "notes": "-" * 50_000} for row in range(80)]
    datasets.Dataset.from_list(rows).to_parquet("rows.parquet")
    Path("run.toml").write_text(RUN_FILE)


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_rows_on_other_ranks(tmp_path: Path, ranks: RankPools) -> None:
    said = train(str(tmp_path), "log.name=whole")
    assert "rows.parquet: 4 blocks of up to 1 MiB to train on" in said
    ranks(2).run(train, str(tmp_path), "train.steps=18", "log.name=parts")
    train(str(tmp_path), "log.name=parts", "train.micro_batch=4")
    whole, parts = (losses(tmp_path / "runs" / name) for name in ("whole", "parts"))
    assert parts == pytest.approx(whole, rel=1e-3)
    saved = json.loads(Path("runs/parts/checkpoints/step-000036/training.json").read_text())
    ((epoch, _, _),) = saved["extra"]["data"]["cursors"]
    assert epoch >= 1


def test_a_source_of_one_block_gives_the_losses_of_rows_in_memory(tmp_path: Path) -> None:
    train(str(tmp_path), "log.name=streamed", "data.block_mib=64", "train.steps=12")
    train(str(tmp_path), "log.name=in-memory", "data.block_mib=16", "data.streaming=false", "train.steps=12")
    streamed, in_memory = (tmp_path / "runs" / name for name in ("streamed", "in-memory"))
    assert losses(streamed) == losses(in_memory)
    assert lines(streamed / "evaluations.jsonl") == lines(in_memory / "evaluations.jsonl")
    weights = "final/model.safetensors"
    assert (streamed / weights).read_bytes() == (in_memory / weights).read_bytes()


def test_a_run_does_not_go_on_with_other_blocks(tmp_path: Path) -> None:
    train(str(tmp_path), "train.steps=2", "checkpoint.every=2")
    with pytest.raises(ConfigError, match=r"cut into blocks of data\.block_mib, had the digest .*: set them back"):
        train(str(tmp_path), "train.steps=4", "data.block_mib=2")


EPOCH = """
import sys
from shardwise.train.config.schema import DataConfig
from shardwise.train.data.batches import Batches, Share, load_datasets

keys = {"streaming": True, "block_mib": 2} if sys.argv[2] == "streamed" else {}
data = load_datasets(DataConfig(source=sys.argv[1], seq_len=512, **keys))
batches = Batches(data.train, Share(0, 1, 64), 64, 0)
tokens = step = 0
while tokens < int(sys.argv[3]):
    tokens += sum(micro.size for micro in batches.batch(step))
    step += 1
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_source(tmp_path: Path) -> None:
    def peak_mib(kind: str, mib: int) -> float:
        """Return the most memory that a process which goes through an epoch has of its own."""
        path = tmp_path / f"{mib}.jsonl"
        row = json.dumps({"text": "the quick brown fox jumps over the lazy dog. " * 40}) + "\n"
        path.write_text(row * (mib * 2**20 // len(row)))
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HOME": str(tmp_path / "cache")}
        tokens = str(int(0.95 * mib * 2**20))
        child = subprocess.Popen([sys.executable, "-c", EPOCH, str(path), kind, tokens], env=environment)
        most = 0
        while child.poll() is None:
            status = Path(f"/proc/{child.pid}/status").read_text()
            found = re.search(r"RssAnon:\s+(\d+) kB", status)
            most = max(most, int(found[1]) if found else 0)
            time.sleep(0.01)
        assert child.returncode == 0
        return most / 1024

    small, large = (peak_mib("streamed", mib) for mib in (16, 64))
    assert large < small + 64
    assert peak_mib("in memory", 64) > large + 300  # 6 bytes for each of its bytes

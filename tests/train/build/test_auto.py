"""`parallel.strategy = "auto"`."""

import contextlib
import io
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.errors import PlanError
from shardwise.plan.hardware.devices import Figure, find_device, write_device
from shardwise.train import trainer
from shardwise.train.build import auto
from shardwise.train.build.models import TextShape
from shardwise.train.config.files import load
from shardwise.train.process.ranks import Ranks
from tests.ranks import RankPools

TINY = """
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2

[data]
source = "texts/*.txt"
seq_len = 32
eval_fraction = 0.0

[train]
steps = 2
micro_batch = 4
global_batch = 8

[parallel]
strategy = "auto"
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    for i in range(8):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"the {i} quick brown foxes jump over {i} lazy dogs. " * 3)
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.chdir(tmp_path)


def run_here(folder: str, overrides: tuple[str, ...]) -> str:
    """Train in a folder. Returns what the rank prints, or its error."""
    printed = io.StringIO()
    before = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed):
            trainer.run(load("tiny.toml", overrides))
    except PlanError as error:
        return f"PlanError: {error}"
    finally:
        os.chdir(before)
    return printed.getvalue()


def small_device(path: str, usable_bytes: float) -> str:
    """Write the hardware file of a CPU with this much memory."""
    little = Figure(usable_bytes, "made for a test")
    write_device(replace(find_device("cpu"), usable_bytes=little, memory_bytes=little), Path(path))
    return path


def test_ranks_train_what_the_first_one_planned(ranks: RankPools) -> None:
    printed, other = ranks(2).run(run_here, str(Path.cwd()), (), timeout_s=120)
    assert other == ""
    assert re.search(r"planned: \w+, micro-batch 4, recompute none; [\d.,]+ GiB of a device's", printed)
    resolved = load("runs/tiny/config.toml")
    assert resolved.parallel.strategy in {"no_shard", "shard_optimizer", "shard_grad_op", "full_shard"}
    assert f"planned: {resolved.parallel.strategy}," in printed
    table = printed[printed.index("rank 0, planned and measured") :]
    row = re.search(r"param_shards\D+([\d.]+ \w+)\D+?([\d.]+ \w+)", table)
    assert row is not None
    assert row[1] == row[2], "shards are forecast to the byte"
    assert re.search(r"step: [\d.]+ s planned, [\d.]+ s measured \(median, [+-]\d+%\)", table)


def test_a_group_to_reshard_to_leaves_out_strategies_that_have_none() -> None:
    config = load("tiny.toml", ["parallel.reshard_after_forward=2"]).for_ranks(2)
    text, two = TextShape(vocab_size=257, end_id=256, seq_len=32), Ranks(0, 2, torch.device("cpu"))
    assert auto._best(config, text, two, find_device("cpu")).job.shard_ranks == 2


def test_memory_decides_and_too_little_is_said_on_every_rank(ranks: RankPools) -> None:
    folder = str(Path.cwd())
    roomy = small_device("roomy.toml", 2**33)
    none = small_device("none.toml", 2**17)
    chosen = ranks(2).run(run_here, folder, (f"parallel.hardware={roomy}", "log.name=roomy"), timeout_s=120)
    assert "planned: " in chosen[0]
    assert "planned and measured" in chosen[0]
    failures = ranks(2).run(run_here, folder, (f"parallel.hardware={none}", "log.name=none"), timeout_s=120)
    for failure in failures:
        assert failure.startswith(
            'PlanError: parallel.strategy="auto": nothing fits 2 x none.toml; the nearest configuration, '
        )
        assert "micro-batch" in failure
    assert [path.name for path in Path("runs/none").iterdir()] == [".lock"], "of a run that never began"

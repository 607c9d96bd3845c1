"""`parallel.strategy = "auto"`."""

import contextlib
import io
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.errors import PlanError
from shardwise.plan.hardware.devices import find_device
from shardwise.train import trainer
from shardwise.train.build import auto
from shardwise.train.build.models import TextShape
from shardwise.train.config.files import load
from shardwise.train.process.ranks import Ranks
from tests.ranks import RankPools
from tests.train.rig import _folder, small_device

__all__ = ["_folder"]  # a fixture


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


def chosen_here(folder: str) -> tuple[str, int, str] | None:
    """Plan on rank 0, which has a process group already."""
    assert dist.is_initialized()
    if dist.get_rank():
        return None
    config = load(f"{folder}/tiny.toml", ["parallel.cp=2"]).for_ranks(2)
    text, two = TextShape(vocab_size=257, end_id=256, seq_len=32), Ranks(0, 2, torch.device("cpu"))
    chosen, outlook = auto.choose(config, text, two, find_device("cpu"))
    return chosen.parallel.strategy, chosen.parallel.cp, outlook.words


@pytest.mark.slow
def test_a_strategy_is_chosen_beside_axes(ranks: RankPools) -> None:
    strategy, cp, words = ranks(2).run(chosen_here, str(Path.cwd()), timeout_s=300)[0]
    assert strategy in {"no_shard", "shard_optimizer", "shard_grad_op", "full_shard"}
    assert cp == 2
    assert words.startswith(f"planned: {strategy} cp2, micro-batch 4x2, recompute none; ")


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

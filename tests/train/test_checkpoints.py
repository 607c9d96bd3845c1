"""Runs that stop and go on: at the same number of ranks bit-exactly, at another in the same order."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.train import trainer
from shardwise.train.config import load
from shardwise.train.trainer import Trainer
from tests.ranks import RankPools

TINY = """
[model.config]
model_type = "gpt2"
n_embd = 16
n_layer = 2
n_head = 2

[data]
source = "texts/*.txt"
seq_len = 16
eval_fraction = 0.2

[train]
steps = 6
micro_batch = 2
global_batch = 4
lr = 1e-2
eval_every = 2
"""


class Killed(Exception):
    """In the middle of a step."""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    for i in range(12):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"the {i} quick brown foxes jump. " * (1 + i % 5))
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.chdir(tmp_path)


def run_here(folder: str, stop_at: int | None, *overrides: str) -> None:
    """Run in a folder; `stop_at`: die in that step, counted from 0."""
    original, before = Trainer.step, Path.cwd()

    def step(self: Trainer, number: int) -> Any:
        if number == stop_at:
            raise Killed
        return original(self, number)

    os.chdir(folder)
    Trainer.step = step  # type: ignore[method-assign]
    try:
        trainer.run(load("tiny.toml", overrides))
    except Killed:
        pass
    finally:
        Trainer.step = original  # type: ignore[method-assign]
        os.chdir(before)


def losses(name: str, file: str = "metrics") -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in Path(f"runs/{name}/{file}.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


def kept(name: str) -> list[str]:
    return sorted(path.name for path in Path(f"runs/{name}/checkpoints").iterdir())


def test_two_ranks_go_on_bit_exactly_and_one_rank_in_the_same_order(ranks: RankPools) -> None:
    here = str(Path.cwd())
    ranks(2).run(run_here, here, None, "log.name=whole", timeout_s=120)
    for name in ("two", "one"):
        ranks(2).run(run_here, here, 5, f"log.name={name}", "checkpoint.every=1", timeout_s=120)
        assert kept(name) == ["step-000004", "step-000005"]  # keep = 2
    Path("runs/two/checkpoints/step-000006.partial").mkdir()
    damaged = Path("runs/two/checkpoints/step-000005/model.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x7f")
    ranks(2).run(run_here, here, None, "log.name=two", "checkpoint.every=3", timeout_s=120)
    assert losses("two") == losses("whole")
    assert losses("two", "evaluations") == losses("whole", "evaluations")
    run_here(here, None, "log.name=one")
    assert [step for step, _ in losses("one")] == [1, 2, 3, 4, 5, 6]
    assert losses("one")[-1][1] == pytest.approx(losses("whole")[-1][1], rel=0.05)  # its dropout is another


def test_checkpoints_that_are_in_the_way_are_an_error() -> None:
    run_here(".", 2, "checkpoint.every=1")
    with pytest.raises(ConfigError, match=r'"never", but .* has 2 checkpoints'):
        run_here(".", None, "checkpoint.resume=never")
    with pytest.raises(ConfigError, match=r"saved with other data, or another data\.seed"):
        run_here(".", None, "data.seed=3")
    for path in Path("runs/tiny/checkpoints").iterdir():
        (path / "training.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"none of the 2 checkpoints .* is intact"):
        run_here(".", None)

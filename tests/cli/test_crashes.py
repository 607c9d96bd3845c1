"""`shardwise train`, killed while it saves and started again with the same command, until it is done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ranks import RankPools
from tests.tiny import GPT2

ROOT = Path(__file__).parents[2]
CONFIG = f"""{GPT2}
[train]
steps = 5
micro_batch = 2
global_batch = 4
lr = 1e-2

[checkpoint]
every = 1

[log]
name = "crashed"
"""
KILL = """
import json, os, signal

kill = json.loads(os.environ.get("KILL", "{}"))
if kill and os.environ.get("RANK") == str(kill["rank"]):
    from tests.checkpoint.publish.file_changes import Death, watching

    def look(change):
        if str(change).startswith(kill["change"]):
            return Death.HALF if kill["half"] else Death.BEFORE

    def die():
        if kill["launcher"]:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    watch = watching("runs/crashed/checkpoints", look, die)
    watch.__enter__()
"""


@dataclass(frozen=True)
class Kill:
    """Which rank is killed, and before which change that it makes to files below `checkpoints/`."""

    rank: int
    change: str
    half: bool = False
    """Whether the rank is killed in the middle of a write instead of before it."""
    launcher: bool = False
    """Whether the launcher is killed too."""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    for i in range(12):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"the {i} quick brown foxes jump. " * (1 + i % 5))
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(KILL)
    monkeypatch.chdir(tmp_path)


def train(kill: Kill | None = None) -> tuple[int, str]:
    """Run the command that a user gives. Returns its exit status and its standard error."""
    path = os.pathsep.join(["hook", str(ROOT), os.environ.get("PYTHONPATH", "")])
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    env = {**clean, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "KILL": json.dumps(kill.__dict__ if kill else {})}
    command = [sys.executable, "-c", "from shardwise.cli.main import main; main()", "train", "run.toml"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


def rows(name: str) -> list[tuple[int, float]]:
    found = [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in found]


def checkpoints() -> list[str]:
    return sorted(path.name for path in Path("runs/crashed/checkpoints").iterdir())


def run_whole(folder: str) -> None:
    from shardwise.train import trainer
    from shardwise.train.config.files import load

    os.chdir(folder)
    trainer.run(load("run.toml", ["log.name=whole", "checkpoint.every=0"]))


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_goes_on_to_the_same_end(ranks: RankPools) -> None:
    status, said = train(Kill(1, "pwrite step-000002.partial/optimizer.safetensors", half=True))
    assert status == 1
    assert said.startswith("error: rank 1 was killed by SIGKILL")
    assert "step-000001" in checkpoints()
    assert "step-000002" not in checkpoints()

    status, said = train(Kill(0, "rename step-000003.partial"))
    assert status == 1, said
    assert checkpoints() == ["step-000001", "step-000002", "step-000003.partial"]

    status, said = train(Kill(0, "unlink step-000002.partial", launcher=True))  # committed step 4, drops step 2
    assert status == -9
    wait_until_nobody_runs_here()
    assert {"step-000003", "step-000004", "step-000002.partial"} <= set(checkpoints())

    assert train() == (0, "")
    assert checkpoints() == ["step-000004", "step-000005"]
    ranks(2).run(run_whole, str(Path.cwd()), timeout_s=120)
    assert rows("crashed") == rows("whole")


def wait_until_nobody_runs_here() -> None:
    """Wait until no rank runs in this directory: one whose launcher and peer are gone must end without help."""
    deadline = time.monotonic() + 30
    here = str(Path.cwd())
    while any(_runs_in(process, here) for process in Path("/proc").glob("[0-9]*")):
        assert time.monotonic() < deadline, "a rank outlived its peer and its launcher"
        time.sleep(0.1)


def _runs_in(process: Path, here: str) -> bool:
    try:
        is_rank = b"SHARDWISE_REPORTS" in (process / "environ").read_bytes()
        return is_rank and str((process / "cwd").readlink()) == here
    except OSError:
        return False

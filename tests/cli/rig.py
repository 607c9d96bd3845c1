"""What the tests of commands share: a start of a run, and what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.cli.conftest import HEARS_HANGUPS

STEPS = 60


TINY = f"""
[model.config]
model_type = "gpt2"
n_embd = 16
n_layer = 2
n_head = 2

[data]
source = "texts/*.txt"
seq_len = 16

[train]
steps = {STEPS}
micro_batch = 2
global_batch = 4
lr = 1e-3

[parallel]
ranks = 2
"""


LAUNCHER = "from shardwise.cli.main import main; main()"


SLOW = """
import os, time
if "STEP_S" in os.environ:
    from shardwise.train import trainer
    original = trainer.Trainer.step
    def step(self, number):
        if number >= 3:
            time.sleep(float(os.environ["STEP_S"]))
        return original(self, number)
    trainer.Trainer.step = step
"""
"""From the third on, steps take a while: a run is not over before it hears what it is sent."""


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    for i in range(12):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"the {i} quick brown foxes jump. " * (1 + i % 5))
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a command and waits until the run has taken three steps."""
    started: list[subprocess.Popen[str]] = []

    def start_(
        *command: str, output: int = subprocess.PIPE, under: Sequence[str] = HEARS_HANGUPS, **environment: str
    ) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(Path("slow").absolute()), os.environ.get("PYTHONPATH", "")])
        clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
        process = subprocess.Popen(
            [*under, sys.executable, *command],
            env={
                **clean,
                "PYTHONPATH": path,
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
                "STEP_S": "0.1",
                **environment,
            },
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        deadline = time.monotonic() + 90
        while len(steps()) < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "no step was taken"
            time.sleep(0.01)
        return process

    yield start_
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def steps() -> list[int]:
    path = Path("runs/tiny/metrics.jsonl")
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]

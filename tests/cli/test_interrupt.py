"""Runs interrupted by real signals: all ranks save and end after the same step, and a resumed run ends the same."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from shardwise.checkpoint import latest, verify
from shardwise.cli.process.launch import STOPPING
from shardwise.train import trainer
from shardwise.train.config.files import load
from tests.cli.conftest import HEARS_HANGUPS
from tests.ranks import RankPools

pytest.importorskip("transformers")

STEPS = 200
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
if "SLOW" in os.environ:
    from shardwise.train import trainer
    original = trainer.Trainer.step
    def step(self, number):
        if number >= 3:
            time.sleep(600)
        return original(self, number)
    trainer.Trainer.step = step
"""
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
            env={**clean, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment},
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


def losses(name: str) -> list[float]:
    return [json.loads(line)["loss"] for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]


def run_here(folder: str, *overrides: str) -> None:
    os.chdir(folder)
    trainer.run(load("tiny.toml", overrides))


def saved_where_it_ended() -> int:
    """Return the step after which the run ended. Its checkpoint must be intact, and no partial one may be left."""
    newest = latest("runs/tiny")
    assert isinstance(newest, Path)
    verify(newest)
    step = int(newest.name.removeprefix("step-"))
    assert steps() == list(range(1, step + 1))
    assert 3 <= step < STEPS
    assert not list(newest.parent.glob("*.partial"))
    return step


def test_an_interrupted_run_is_saved_and_goes_on_bit_exactly(start: Start, ranks: RankPools) -> None:
    process = start("-c", LAUNCHER, "train", "tiny.toml", "checkpoint.every=1000")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, f"{STOPPING}\ninterrupted\n")
    step = saved_where_it_ended()
    assert f"interrupted after step {step}: saved as runs/tiny/checkpoints/step-{step:06d}" in out
    here = str(Path.cwd())
    ranks(2).run(run_here, here, timeout_s=120)
    ranks(2).run(run_here, here, "log.name=whole", timeout_s=120)
    assert len(losses("whole")) == STEPS
    assert losses("tiny") == losses("whole")


def test_a_run_whose_terminal_is_closed_is_saved(start: Start) -> None:
    reading, writing = pty.openpty()
    process = start("-c", LAUNCHER, "train", "tiny.toml", "checkpoint.every=1000", output=writing)
    os.close(writing)
    os.close(reading)  # from here on, a plain print raises
    for _ in range(2):  # one from the shell, one from the kernel
        process.send_signal(signal.SIGHUP)
        time.sleep(0.05)
    assert process.wait(60) == 130
    saved_where_it_ended()


def test_a_hangup_does_not_end_a_run_under_nohup(start: Start) -> None:
    """Neither in its launcher nor in its ranks, to which the shell sends it too."""
    process = start("-c", LAUNCHER, "train", "tiny.toml", "train.steps=60", under=("nohup",))
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(ranks) == 2
    for pid in (process.pid, *map(int, ranks)):
        os.kill(pid, signal.SIGHUP)
    assert len(steps()) < 60
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    assert steps() == list(range(1, 61))
    assert Path("runs/tiny/final/model.safetensors").exists()


@pytest.mark.slow
def test_asynchronous_saves_are_waited_for(start: Start) -> None:
    process = start("-c", LAUNCHER, "train", "tiny.toml", "checkpoint.every=1", "checkpoint.asynchronous=true")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    saved_where_it_ended()
    assert len(list(Path("runs/tiny/checkpoints").iterdir())) == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_torchrun_sends_it_on(start: Start, number: signal.Signals) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    process = start(*torchrun, "-m", "shardwise.cli.main", "train", "tiny.toml", "checkpoint.every=1000")
    process.send_signal(number)
    process.communicate(timeout=60)
    saved_where_it_ended()


@pytest.mark.slow
def test_a_second_interrupt_ends_it_at_once(start: Start) -> None:
    process = start("-c", LAUNCHER, "train", "tiny.toml", "checkpoint.every=1000", SLOW="1")
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert latest("runs/tiny") is None

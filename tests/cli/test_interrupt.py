"""Runs interrupted by real signals: all ranks save and end after the same step, and a resumed run ends the same."""

from __future__ import annotations

import json
import os
import pty
import signal
import time
from pathlib import Path

import pytest

from shardwise.checkpoint import latest, verify
from shardwise.cli.process.launch import STOPPING
from shardwise.train import trainer
from shardwise.train.config.files import load
from tests.cli.rig import LAUNCHER, STEPS, Start, _folder, start, steps

__all__ = ["_folder", "start"]  # fixtures
from tests.ranks import RankPools

pytest.importorskip("transformers")


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_hangup_does_not_end_a_run_under_nohup(start: Start) -> None:
    """Neither in its launcher nor in its ranks, to which the shell sends it too."""
    process = start("-c", LAUNCHER, "train", "tiny.toml", "train.steps=20", under=("nohup",))
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(ranks) == 2
    for pid in (process.pid, *map(int, ranks)):
        os.kill(pid, signal.SIGHUP)
    assert len(steps()) < 20
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    assert steps() == list(range(1, 21))
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
    process = start("-c", LAUNCHER, "train", "tiny.toml", "checkpoint.every=1000", STEP_S="600")
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert latest("runs/tiny") is None

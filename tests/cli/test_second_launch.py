"""Two launches into one run's directory: the second is refused if the process of the first still runs."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.train.run.run_lock import NAME
from tests.cli.rig import LAUNCHER, Start, _folder, start, steps

__all__ = ["_folder", "start"]  # fixtures

RUN = Path("runs/tiny")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "shardwise.cli.main")


@pytest.mark.slow
def test_a_second_launch_is_refused_by_name_and_a_dead_one_does_not_block(start: Start) -> None:
    """The first launch is a torchrun that is killed: rank 0 holds the lock until the ranks have ended themselves."""
    first = start(*TORCHRUN, "train", "tiny.toml", "checkpoint.every=2", STEP_S="600")
    holder = (RUN / NAME).read_text()
    found = re.fullmatch(rf"process (\d+) on {re.escape(socket.gethostname())}, started at [-\d: ]+ UTC", holder)
    assert found is not None
    metrics = (RUN / "metrics.jsonl").read_bytes()
    second = subprocess.run(
        [sys.executable, "-c", LAUNCHER, "train", "tiny.toml", "checkpoint.every=2"],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert second.returncode == 2
    assert second.stderr == (
        f"error: runs/tiny is being written by {holder}: wait for it, stop it, or set log.name to train in "
        "another directory\n"
    )
    assert (RUN / "metrics.jsonl").read_bytes() == metrics
    first.kill()
    first.wait()
    end = time.monotonic() + 60
    while Path(f"/proc/{found[1]}").exists():
        assert time.monotonic() < end, "rank 0 lives on without its torchrun"
        time.sleep(0.1)
    third = start("-c", LAUNCHER, "train", "tiny.toml", "checkpoint.every=2", "train.steps=6")
    out, err = third.communicate(timeout=90)
    assert (third.returncode, err) == (0, "")
    assert "resuming from runs/tiny/checkpoints/step-000002" in out
    assert steps() == [1, 2, 3, 4, 5, 6]

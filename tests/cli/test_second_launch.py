"""Two launches into one run's directory: the second is refused if the process of the first still runs."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.train.run.run_lock import NAME
from tests.cli.rig import LAUNCHER, Start, _folder, start, steps

__all__ = ["_folder", "start"]  # fixtures

RUN = Path("runs/tiny")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "shardwise.cli.main")


@pytest.mark.slow
def test_a_second_launch_is_refused_by_name_and_a_dead_one_does_not_block(start: Start) -> None:
    """The first launch is a torchrun that is killed: its ranks live on, and rank 0 holds the lock."""
    first = start(*TORCHRUN, "train", "tiny.toml", "checkpoint.every=2", STEP_S="600")
    holder = (RUN / NAME).read_text()
    found = re.fullmatch(rf"process (\d+) on {re.escape(socket.gethostname())}, started at [-\d: ]+ UTC", holder)
    assert found is not None
    first.kill()  # its ranks live on
    first.wait()
    try:
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
    finally:
        for pid in children_of_the_same_run(int(found[1])):
            os.kill(pid, signal.SIGKILL)
    third = start("-c", LAUNCHER, "train", "tiny.toml", "checkpoint.every=2", "train.steps=6")
    out, err = third.communicate(timeout=90)
    assert (third.returncode, err) == (0, "")
    assert "resuming from runs/tiny/checkpoints/step-000002" in out
    assert steps() == [1, 2, 3, 4, 5, 6]


def children_of_the_same_run(first: int) -> list[int]:
    """Return the process ids of all ranks of the run of rank `first`: torchrun gave them the same MASTER_PORT."""

    def port(pid: int) -> bytes:
        try:
            found = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return b""
        return b"".join(entry for entry in found if entry.startswith((b"TORCHELASTIC_RUN_ID=", b"MASTER_PORT=")))

    wanted = port(first)
    assert wanted
    return [
        int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal() and port(int(path.name)) == wanted
    ]

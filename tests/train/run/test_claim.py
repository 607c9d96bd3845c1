"""Two launches into one run's directory: the second is refused, and never by a process that is gone."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint.ranks.file_barrier import machine
from shardwise.comm.shared_memory.counters import birth
from shardwise.errors import ConfigError
from shardwise.train.ranks import Ranks
from shardwise.train.run.claim import NAME, claimed
from tests.cli.test_interrupt import LAUNCHER, Start, _folder, start, steps

__all__ = ["_folder", "start"]  # fixtures

ALONE = Ranks(0, 1, torch.device("cpu"))
RUN = Path("runs/tiny")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "shardwise.cli.main")


def test_a_second_launch_is_refused_by_name_and_a_dead_one_does_not_block(start: Start) -> None:
    """As orphans of a torchrun that was killed would be met: their first rank still runs."""
    first = start(*TORCHRUN, "train", "tiny.toml", "checkpoint.every=2", SLOW="1")
    holder = json.loads((RUN / NAME).read_text())
    assert holder["host"] == socket.gethostname()
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
            f"error: runs/tiny is being written by process {holder['pid']} on {holder['host']}, which began at "
            f"{holder['began']}: wait for it, stop it (kill {holder['pid']}), or set log.name to train beside it; if "
            f"there is no such process, remove runs/tiny/{NAME}\n"
        )
        assert (RUN / "metrics.jsonl").read_bytes() == metrics
    finally:
        for pid in children_of_the_same_run(holder["pid"]):
            os.kill(pid, signal.SIGKILL)
    third = start("-c", LAUNCHER, "train", "tiny.toml", "checkpoint.every=2", "train.steps=6")
    out, err = third.communicate(timeout=90)
    assert (third.returncode, err) == (0, "")
    assert "going on from runs/tiny/checkpoints/step-000002" in out
    assert steps() == [1, 2, 3, 4, 5, 6]
    assert not (RUN / NAME).exists()


def children_of_the_same_run(first: int) -> list[int]:
    """Ranks of the run: they have one process group of torchrun's making each, but one MASTER_PORT."""

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


# In one process -------------------------------------------------------------------------------------------------------

HOLD = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(fd, fcntl.LOCK_EX)
os.pwrite(fd, sys.argv[2].encode(), 0)
print("held", flush=True)
sys.stdin.read()
"""


def held(text: str = "") -> subprocess.Popen[str]:
    """Another process with the lock, and what it has said of itself."""
    RUN.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", HOLD, str(RUN / NAME), text]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def record(process: subprocess.Popen[str], **changes: Any) -> dict[str, Any]:
    own = {"pid": process.pid, "host": "here", "began": "then", "machine": machine(), "born": birth(process.pid)}
    return {**own, **changes}


def take(said: list[str]) -> None:
    with claimed(RUN, ALONE, said.append):
        assert json.loads((RUN / NAME).read_text())["pid"] == os.getpid()


def test_a_lock_whose_holder_has_not_said_who_it_is() -> None:
    process = held()
    with pytest.raises(ConfigError, match=r"written by another process: wait for it, stop it, or set log\.name"):
        take([])
    process.communicate("")
    take([])
    assert not RUN.exists() or not list(RUN.iterdir())


def test_what_a_dead_process_left_does_not_block() -> None:
    process = held("not JSON")
    process.kill()
    process.communicate()
    assert (RUN / NAME).exists()
    take([])


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_the_living_of_this_machine_are_noticed(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    process = held()

    def lockf(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    (RUN / NAME).write_text(json.dumps(record(process)))
    with pytest.raises(ConfigError, match=rf"written by process {process.pid} on here, which began at then"):
        take([])
    said: list[str] = []
    for other in ({"machine": "another"}, {"born": 1}):
        (RUN / NAME).write_text(json.dumps(record(process, **other)))
        take(said)
    left = record(process)
    process.communicate("")
    RUN.mkdir(parents=True, exist_ok=True)
    (RUN / NAME).write_text(json.dumps(left))
    take(said)
    assert len(said) == 3
    assert "storage without locks" in said[0]


def test_a_directory_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("runs").write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot write the run directory runs/tiny: (Not a directory|File exists)"):
        take([])


def test_what_a_link_leads_to_is_left_alone() -> None:
    RUN.mkdir(parents=True)
    Path("thesis").write_text("of years")
    (RUN / NAME).symlink_to(Path("thesis").absolute())
    with pytest.raises(ConfigError, match=r"runs/tiny/\.running is a link, .*: remove it"):
        take([])
    assert Path("thesis").read_text() == "of years"


def test_nothing_is_left_where_nothing_was_written() -> None:
    take([])
    assert not Path("runs").exists()
    RUN.mkdir(parents=True)
    take([])
    assert RUN.is_dir()


def test_a_file_that_was_removed_in_the_meantime_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder ends between open and lock."""
    original, first = fcntl.lockf, iter([True])

    def lockf(*arguments: Any) -> None:
        if next(first, False):
            (RUN / NAME).unlink()
        original(*arguments)

    monkeypatch.setattr(fcntl, "lockf", lockf)
    take([])

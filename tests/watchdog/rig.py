"""Ranks without a launcher, so that each ends by itself, and when and with what words they ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("job.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    seconds: float
    """From the fault to the end of the last rank; inf if one was still there."""
    statuses: list[int]
    """By rank; that of a rank that had to be killed is None's stand-in, -9."""
    said: list[str]
    """By rank: standard error."""

    @property
    def words(self) -> str:
        """What all ranks said."""
        return "\n".join(self.said)


def play(
    engine: str, fault: str, directory: Path, timeout_s: float | None = 6, world_size: int = 3, most_s: float = 90
) -> Ended:
    """Run the job, and kill what is left of it `most_s` after the fault. `timeout_s`: None = the user has set none."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **ENVIRONMENT,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
    } | ({} if timeout_s is None else {"SHARDWISE_HANG_TIMEOUT_S": str(timeout_s)})
    job = [sys.executable, str(JOB), engine, fault, str(directory)]
    files = [directory / f"stderr-{rank}" for rank in range(world_size)]
    ranks = []
    for rank, file in enumerate(files):
        with file.open("wb") as stderr:
            ranks.append(subprocess.Popen(job, env={**environment, "RANK": str(rank)}, stderr=stderr))
    mark, deadline = directory / "begun", time.time() + 5 * most_s
    while any(rank.poll() is None for rank in ranks) and time.time() < deadline:
        time.sleep(0.1)
        if mark.exists() and (written := mark.read_text()):
            deadline = float(written) + most_s
    ended = time.time()
    left = [rank for rank in ranks if rank.poll() is None]
    for rank in left:
        rank.send_signal(signal.SIGKILL)
    begun = float(mark.read_text()) if mark.exists() else ended
    return Ended(
        float("inf") if left else ended - begun,
        [rank.wait() for rank in ranks],
        [file.read_text(errors="replace") for file in files],
    )


def torchrun_command(world_size: int, fault: str, directory: Path) -> list[str]:
    """Return the command by which torchrun starts the job."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    return [*torchrun, str(JOB), "shardwise", fault, str(directory)]


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Return when a condition holds. Raises AssertionError if that takes longer."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.1)

"""A host is lost, or cut off: the ranks that are left say so and end in time, and the job resumes when it is back."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.hosts.rig import Host
from tests.tiny import GPT2

WATCHED = Path(__file__).parents[1] / "watchdog" / "job.py"
RECIPE = Path(__file__).parents[2] / "examples" / "hosts" / "torchrun.sh"
TIMEOUT_S, MARGIN_S = 8, 12
STEPS = 30
CONFIG = f"""{GPT2}
[train]
steps = {STEPS}
micro_batch = 1
lr = 1e-3

[checkpoint]
every = 4
"""
SLOW = """
import time
from shardwise.train import trainer
original = trainer.Trainer.step
def step(self, number):
    time.sleep(0.1)
    return original(self, number)
trainer.Trainer.step = step
"""


class Job:
    """A run of `shardwise train` on two hosts, as `examples/hosts/torchrun.sh` starts it."""

    def __init__(self, hosts: tuple[Host, ...], folder: Path, *overrides: str, number: str = "2") -> None:
        """overrides: of the configuration. number: of hosts, as the recipe takes it."""
        self.hosts, self.folder, self.overrides, self.number = hosts, folder, overrides, number
        (folder / "texts").mkdir()
        for i in range(12):
            (folder / "texts" / f"{i}.txt").write_text(f"the {i} quick brown foxes jump. " * (1 + i % 5))
        (folder / "run.toml").write_text(CONFIG)
        (folder / "sitecustomize.py").write_text(SLOW)

    def start(self, host: Host) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        more = {"PATH": path, "RANKS_PER_HOST": "2", "SHARDWISE_HANG_TIMEOUT_S": str(TIMEOUT_S)}
        line = ["sh", str(RECIPE), self.hosts[0].name, self.number, "run.toml", *self.overrides]
        host.start(line, self.output(host), self.folder, **more)

    def output(self, host: Host) -> Path:
        return self.folder / f"{host.name}.txt"

    def said(self, host: Host) -> str:
        return self.output(host).read_text(encoding="utf-8")

    def losses(self, name: str = "run") -> dict[int, float]:
        file = self.folder / "runs" / name / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return {row["step"]: row["loss"] for row in rows}

    def wait_until(self, what: str, holds: object, seconds: float) -> float:
        began = time.monotonic()
        while not holds():  # type: ignore[operator]
            words = "\n".join(self.said(host) for host in self.hosts)
            assert time.monotonic() - began < seconds, f"not within {seconds} s: {what}\n{words}"
            time.sleep(0.1)
        return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_goes_on_when_a_lost_host_is_back(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    first, second = hosts
    job = Job(hosts, tmp_path)
    for host in hosts:
        job.start(host)
    job.wait_until("ten steps", lambda: len(job.losses()) >= 10, 180)
    second.lose_power()
    before = job.losses()
    job.wait_until(
        "the ranks that are left name the lost ones", lambda: "rank 2" in job.said(first), TIMEOUT_S + MARGIN_S
    )
    second.mend()
    job.start(second)
    job.wait_until("the end", lambda: all(one.poll() is not None for host in hosts for one in host.jobs), 300)
    assert [one.wait() for host in hosts for one in host.jobs] == [0, 0], job.said(first)
    after = job.losses()
    assert sorted(after) == list(range(1, STEPS + 1))
    assert {step: after[step] for step in before} == before


@pytest.mark.slow
def test_ranks_on_both_sides_of_a_cut_end_in_time(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    first, _ = hosts
    more = {"MASTER_ADDR": first.name, "MASTER_PORT": "29501", "WORLD_SIZE": "2", "SHARDWISE_HANG_TIMEOUT_S": "5"}
    command = [sys.executable, str(WATCHED), "shardwise", "runs on", str(tmp_path)]
    jobs = [host.start(command, tmp_path / host.name, **more, RANK=str(rank)) for rank, host in enumerate(hosts)]
    words = [tmp_path / host.name for host in hosts]
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline, [file.read_text() for file in words]
        time.sleep(0.1)
    time.sleep(1)
    first.cut()
    assert [job.wait(5 * 2 + 20) for job in jobs] == [1, 1]
    with_store, without = (file.read_text(encoding="utf-8") for file in words)
    assert "rank 1 is gone, or its host is not reached. All ranks end." in with_store
    assert "does not answer: its process or host is gone or not reached. The rank ends." in without

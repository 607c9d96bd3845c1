"""A host is lost, or cut off: the ranks that are left say so and end in time, and the job resumes when it is back."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.hosts.rig import MARGIN_S, STEPS, TIMEOUT_S, Host, Job

WATCHED = Path(__file__).parents[1] / "watchdog" / "job.py"


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

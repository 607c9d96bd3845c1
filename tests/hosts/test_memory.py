"""Ranks and hosts are killed in a run that writes no checkpoint: torchrun starts the ranks again, and the run resumes
from the copies in memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.train import trainer
from shardwise.train.config.files import load
from tests.hosts.rig import MARGIN_S, ROOT, STEPS, TIMEOUT_S, Host, Job
from tests.ranks import RankPools

EVERY, LOST_IN = 4, 10
KILLED = f"""
import glob, os, signal, time
from shardwise.train import trainer
original = trainer.Trainer.step
def step(self, number):
    if number == {LOST_IN - 1} and (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        while not glob.glob("memory/shardwise-*/step-000008"):  # it is made in the background
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, number)
trainer.Trainer.step = step
"""
"""Rank 1 is killed in a step, in the first launch."""
RESTARTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, torch 2.13 restarts ranks with the addresses of those that are gone."""
NO_DROPOUT = tuple(f"model.config.{kind}_pdrop=0.0" for kind in ("resid", "embd", "attn"))
"""Ranks draw their own, so that other numbers of ranks drop other activations."""
OPTIONS = (f"checkpoint.memory_every={EVERY}", "checkpoint.every=0", "train.global_batch=4", *NO_DROPOUT)


def whole(folder: str) -> None:
    """Train in a folder without a fault."""
    os.chdir(folder)
    trainer.run(load("run.toml", ["log.name=whole", *OPTIONS[1:]]))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_rank_costs_the_steps_since_the_last_copy(tmp_path: Path, ranks: RankPools) -> None:
    job = Job((), tmp_path)
    (tmp_path / "sitecustomize.py").write_text(KILLED)
    (tmp_path / "memory").mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src"), str(ROOT)])
    more = {
        "PYTHONPATH": path,
        "SHARDWISE_MEMORY_DIR": "memory",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **RESTARTS,
    }
    done = subprocess.run(
        [*command, "-m", "shardwise", "train", "run.toml", *OPTIONS],
        cwd=tmp_path,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9) local_rank: 1" in done.stderr
    assert "step-000008: step 9 is next" in done.stdout
    assert not (tmp_path / "runs" / "run" / "checkpoints").exists()
    assert not list((tmp_path / "memory").iterdir()), "copies are left behind"
    ranks(2).run(whole, str(tmp_path), timeout_s=300)
    assert job.losses() == job.losses("whole")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_back", [True, False])
def test_a_lost_host_costs_the_steps_since_the_last_copy(
    hosts: tuple[Host, Host], tmp_path: Path, is_back: bool
) -> None:
    first, second = hosts
    job = Job(hosts, tmp_path, *OPTIONS, number="2" if is_back else "1:2")
    for host in hosts:
        job.start(host)
    job.wait_until("a step after two copies", lambda: len(job.losses()) >= 2 * EVERY + 3, 240)
    second.lose_power()  # its memory is gone with it
    before = job.losses()
    job.wait_until("the ranks that are left know", lambda: "rank 2" in job.said(first), TIMEOUT_S + MARGIN_S)
    if is_back:
        second.mend()
        job.start(second)
    job.wait_until("the end", lambda: all(one.poll() is not None for host in hosts for one in host.jobs), 300)
    assert [one.wait() for host in hosts for one in host.jobs] == [0] * (1 + is_back), job.said(first)
    resumed_at = int(re.findall(r"step-(\d+): step \d+ is next", job.said(first))[-1])
    assert max(before) - 2 * EVERY <= resumed_at < max(before)  # the newest copy may not have been complete
    assert not (tmp_path / "runs" / "run" / "checkpoints").exists()
    after = job.losses()
    assert sorted(after) == list(range(1, STEPS + 1))
    again = {step: after[step] for step in before}
    assert again == (before if is_back else pytest.approx(before, rel=1e-5))

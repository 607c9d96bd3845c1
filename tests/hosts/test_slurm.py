"""examples/hosts/slurm.sbatch under Slurm itself: its controller and daemons run on two hosts of one machine."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.rig import MARGIN_S, ROOT, STEPS, TIMEOUT_S, Host, Job

RECIPE = ROOT / "examples" / "hosts" / "slurm.sbatch"
DAEMONS = ("slurmctld", "slurmd", "sbatch")
LOST_AFTER_S = 10
"""Seconds without an answer after which Slurm takes a host for lost."""
CLUSTER = f"""ClusterName=two
SlurmctldHost={{controller}}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
SchedulerParameters=requeue_delay=1
GresTypes=gpu
ReturnToService=2
SlurmdTimeout={LOST_AFTER_S}
StateSaveLocation={{folder}}/state
SlurmdSpoolDir={{folder}}/spool-%n
SlurmdPidFile={{folder}}/%n.pid
SlurmctldPidFile={{folder}}/controller.pid
PartitionName=all Nodes=ALL Default=YES State=UP
"""
"""What an administrator writes. The hosts' two GPUs are devices that every machine has; no rank touches them."""


class Cluster:
    """Slurm on two hosts. The second one has its controller, so that the first one may be lost."""

    def __init__(self, hosts: tuple[Host, Host], folder: Path) -> None:
        self.hosts, self.job = hosts, Job((), folder)
        self.folder = folder = folder / "slurm"
        folder.mkdir()
        self._settings = {"SLURM_CONF": str(folder / "slurm.conf")}
        for name in ("state", *(f"spool-{host.name}" for host in hosts)):
            (folder / name).mkdir()
        controller = hosts[1]
        nodes = "".join(f"NodeName={host.name} NodeAddr={host.address} CPUs=8 Gres=gpu:2\n" for host in hosts)
        written = CLUSTER.format(folder=folder, controller=f"{controller.name}({controller.address})")
        (folder / "slurm.conf").write_text(written + nodes)
        (folder / "gres.conf").write_text("AutoDetect=off\nName=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        controller.start(["slurmctld", "-D"], folder / "controller.txt", **self._settings)
        for host in hosts:
            self.join(host)

    def join(self, host: Host) -> None:
        """Start the daemon of a host."""
        host.start(["slurmd", "-D"], self.folder / f"slurmd-{host.name}.txt", self.folder, **self._settings)

    def ask(self, *command: str) -> str:
        """Return what a command of Slurm prints, without the space around it."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        more = {**self._settings, "PATH": path, "SHARDWISE_HANG_TIMEOUT_S": str(TIMEOUT_S)}
        job = self.hosts[1].start(command, directory=self.job.folder, **more)
        said, _ = job.communicate(timeout=60)
        self.hosts[1].jobs.remove(job)
        assert job.returncode == 0, said
        return said.strip()

    def submit(self, *overrides: str) -> str:
        """Submit the recipe with the configuration of the job, for smaller hosts than its own; return the number."""
        sizes = ["--gpus-per-node=2", "--cpus-per-task=4"]
        return self.ask("sbatch", "--parsable", *sizes, str(RECIPE), "run.toml", *overrides)

    def state(self, number: str) -> str:
        """Return the state of a job: PENDING, RUNNING, COMPLETED and so on."""
        found = re.search(r"JobState=(\w+)", self.ask("scontrol", "show", "job", number))
        assert found
        return found[1]

    def said(self) -> str:
        """Return what jobs have printed."""
        return "\n".join(file.read_text(encoding="utf-8") for file in sorted(self.job.folder.glob("shardwise-*.out")))

    def wait_until(self, what: str, holds: Callable[[], bool], seconds: float) -> None:
        """Wait for something, at most so long."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{self.said()}"
            time.sleep(0.5)

    def check_resumed(self, before: dict[int, float]) -> None:
        """Check that the job went on from a checkpoint, and that its losses are those of the launch before."""
        assert re.search(r"resuming from runs/run/checkpoints/step-\d+: step \d+ is next", self.said())
        after = self.job.losses()
        assert sorted(after) == list(range(1, STEPS + 1))
        assert {step: after[step] for step in before} == before


@pytest.fixture
def cluster(hosts: tuple[Host, Host], tmp_path: Path) -> Cluster:
    if missing := [daemon for daemon in DAEMONS if shutil.which(daemon) is None]:
        pytest.skip(f"{missing[0]} is not installed (Debian's slurm-wlm has it)")
    return Cluster(hosts, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_is_started_again_when_its_first_host_is_back(cluster: Cluster) -> None:
    first, _ = cluster.hosts
    number = cluster.submit()
    cluster.wait_until("ten steps", lambda: len(cluster.job.losses()) >= 10, 180)
    first.lose_power()
    before = cluster.job.losses()
    cluster.wait_until("Slurm knows", lambda: cluster.state(number) == "PENDING", 3 * LOST_AFTER_S + MARGIN_S)
    first.mend()
    cluster.join(first)
    cluster.wait_until("the end", lambda: cluster.state(number) == "COMPLETED", 300)
    cluster.check_resumed(before)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_that_is_put_back_into_the_queue_resumes(cluster: Cluster) -> None:
    number = cluster.submit()
    cluster.wait_until("six steps", lambda: len(cluster.job.losses()) >= 6, 180)
    cluster.ask("scontrol", "requeue", number)
    before = cluster.job.losses()
    cluster.wait_until("the end", lambda: cluster.state(number) == "COMPLETED", 300)
    cluster.check_resumed(before)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_signal_before_the_time_limit_loses_no_step(cluster: Cluster) -> None:
    number = cluster.submit("checkpoint.every=100")
    cluster.wait_until("six steps", lambda: len(cluster.job.losses()) >= 6, 180)
    cluster.ask("scancel", "--signal=TERM", number)  # as --signal does: to the steps of the job, not to its script
    cluster.wait_until("it leaves", lambda: cluster.state(number) not in {"RUNNING", "COMPLETING"}, 60)
    before = cluster.job.losses()
    again = cluster.submit("checkpoint.every=100")
    cluster.wait_until("the end", lambda: cluster.state(again) == "COMPLETED", 300)
    cluster.check_resumed(before)
    assert f"step {max(before) + 1} is next" in cluster.said()

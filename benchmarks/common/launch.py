"""Starts the fresh processes of a job and gathers what their ranks report."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import ROOT, on_ranks
from benchmarks.common.job import Job, RankReport, error_path
from shardwise.cli.process.launch import malloc_settings


class JobFailed(RuntimeError):
    """A job's processes ended with an error: `str()` is one line, `output` what they printed."""

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.output = output


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of a measuring process: one thread, this checkout, quiet libraries, and freed
    memory kept as the launcher has it kept, whichever engine is measured."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    fixed = {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "DS_ACCELERATOR": "cpu",
        "PYTHONWARNINGS": "ignore",
    }
    return {**malloc_settings(os.environ), **os.environ, **fixed, **extra}


def run(command: list[str], env: dict[str, str], timeout_s: float) -> str:
    """Run a Python command line to its end and return its standard output."""
    try:
        done = subprocess.run(
            [sys.executable, *command],
            check=False,
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise JobFailed(f"no end after {timeout_s:.0f} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise JobFailed(last, done.stdout + done.stderr)
    return done.stdout


def run_job(job: Job, timeout_s: float = 1800.0) -> list[RankReport]:
    """Run a job in processes of its own and return the reports in the order of ranks.

    Raises:
        JobFailed: a rank failed or did not finish in time.
    """
    extra = {"OMP_NUM_THREADS": str(job.threads)}
    if job.checkout is not None:
        extra["PYTHONPATH"] = os.pathsep.join([str(Path(job.checkout) / "src"), environment()["PYTHONPATH"]])
    if job.count_bytes:
        extra["SHARDWISE_COLLECTIVES"] = "gloo"  # shared memory would bypass c10d and the loopback interface
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        job.save(directory / "job.json")
        worker = ["-m", "benchmarks.steps.worker", str(directory / "job.json"), name]
        try:
            run(on_ranks(job.ranks, *worker), environment(**extra), timeout_s)
        except JobFailed as error:
            raise _explained(error, job, directory) from error
        return [RankReport.load(directory, rank) for rank in range(job.ranks)]


def _explained(error: JobFailed, job: Job, directory: Path) -> JobFailed:
    """Prefer a failing rank's own traceback to the launcher's account of it."""
    for rank in range(job.ranks):
        if (path := error_path(directory, rank)).exists():
            trace = path.read_text()
            return JobFailed(f"rank {rank}: {trace.strip().splitlines()[-1]}", trace)
    return error

"""Processes that forecast: when they start, how they end, and what is said of one that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import PlanError
from shardwise.plan.dry_run.job import Job
from shardwise.plan.search.processes import Forecasters

TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 320,
}  # fmt: skip
JOB = Job(gpus_per_node=2, seq_len=64)


@pytest.fixture(autouse=True)
def _empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_PLAN_CACHE", str(tmp_path))


def started(forecasters: Forecasters) -> list[Any]:
    return [process._process for process in forecasters._processes]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_starts_with_the_first_forecast_that_is_not_cached() -> None:
    with Forecasters(TINY, 2) as forecasters:
        assert started(forecasters) == [None, None]
        found = forecasters(JOB)
        assert [process is not None for process in started(forecasters)] == [True, False]
        assert forecasters(JOB) == found
    assert all(process.poll() is not None for process in started(forecasters) if process is not None)
    with Forecasters(TINY, 2) as forecasters:
        assert forecasters(JOB) == found
        assert started(forecasters) == [None, None]


def test_a_process_that_died_is_an_error_that_says_so() -> None:
    with Forecasters(TINY, 2) as forecasters:
        forecasters(JOB)
        started(forecasters)[0].kill()
        with pytest.raises(PlanError, match="a process of the search exited with status -9"):
            forecasters(Job(gpus_per_node=4, seq_len=64))


def test_a_process_ends_with_a_caller_that_is_killed() -> None:
    program = (
        "import sys, time\n"
        "from tests.plan.search.test_processes import *\n"
        "forecasters = Forecasters(TINY, 2)\n"
        "forecasters(JOB)\n"
        "print(started(forecasters)[0].pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    root = Path(__file__).parents[3]
    caller = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=root)
    assert caller.stdout is not None
    process = int(caller.stdout.readline())
    os.kill(process, 0)
    caller.send_signal(signal.SIGKILL)
    caller.communicate()
    until(lambda: _is_gone(process))


def _is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True

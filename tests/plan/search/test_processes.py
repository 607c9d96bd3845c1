"""Processes that forecast: when they start, and what is said of one that dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import PlanError
from shardwise.plan.dry_run.job import Job
from shardwise.plan.models.description import keep_attention
from shardwise.plan.search.processes import Forecasters

TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 320,
}  # fmt: skip
JOB = Job(gpus_per_node=2, seq_len=64)


@pytest.fixture(autouse=True)
def _empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_PLAN_CACHE", str(tmp_path))


def processes(forecasters: Forecasters) -> list[Any]:
    pipes = [worker.pipe for worker in forecasters._workers]  # type: ignore[attr-defined]
    return [None if pipe is None else pipe.process for pipe in pipes]


def test_processes_start_at_once_where_the_machine_has_not_met_the_model() -> None:
    with Forecasters(TINY, 2) as forecasters:
        started = processes(forecasters)
        assert all(process.poll() is None for process in started)
    assert all(process.poll() is not None for process in started)


def test_a_process_starts_with_the_first_forecast_where_the_model_was_met() -> None:
    keep_attention(TINY, "sdpa")
    with Forecasters(TINY, 2) as forecasters:
        assert processes(forecasters) == [None, None]
        found = forecasters(JOB)
        assert [process is not None for process in processes(forecasters)] == [True, False]
        assert forecasters(JOB) == found  # kept
    with Forecasters(TINY, 2) as forecasters:
        assert forecasters(JOB) == found
        assert processes(forecasters) == [None, None]


def test_a_process_that_died_is_an_error_that_says_so() -> None:
    with Forecasters(TINY, 2) as forecasters:
        for process in processes(forecasters):
            process.kill()
            process.wait()
        with pytest.raises(PlanError, match="a process of the search exited with status -9"):
            forecasters(JOB)

"""What a benchmark sees of a program from outside."""

import json

import pytest

from benchmarks import planner_speed
from benchmarks.launch import JobFailed
from benchmarks.process_tree import Ran, watched

MIB = 2**20
HOLD = "import time; held = b'x' * (64 * 2**20); time.sleep(0.4)"
"""64 MiB, long enough to be seen."""


def test_children_are_counted_and_their_memory_added() -> None:
    alone = watched(["-c", HOLD], 60.0)
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]]); print('x' * 200000)"
    both = watched(["-c", child, HOLD], 60.0)
    assert (alone.processes, both.processes) == (1, 2)
    assert alone.peak_bytes > 64 * MIB
    assert both.peak_bytes - alone.peak_bytes > 2 * MIB, "the parent's own memory counts too"
    assert len(both.output) == 200001, "output that no pipe holds is no reason to stand still"
    assert alone.wall_s > 0.4


def test_a_program_that_fails_is_told_in_its_last_line() -> None:
    with pytest.raises(JobFailed, match=r"^ValueError: no$"):
        watched(["-c", "raise ValueError('no')"], 60.0)


def test_a_program_without_end_is_ended_with_its_children() -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with pytest.raises(JobFailed, match="no end in time"):
        watched(["-c", child], 1.0)


def ran(plain: object, wall_s: float, peak_bytes: int) -> Ran:
    return Ran(json.dumps(plain), wall_s, peak_bytes, processes=3)


def test_what_a_forecast_and_a_search_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    forecast = {
        "parameters": 405e9, "job": {"world_size": 1024}, "peak_memory_bytes": 1, "reserved_memory_bytes": 1,
        "fits": True, "step_time_s": 1.0, "mfu": 0.4,
    }  # fmt: skip
    monkeypatch.setattr(planner_speed, "watched", lambda *_: ran(forecast, 30.0, 9 * 2**30))
    result, (seconds, memory) = planner_speed.forecast()
    assert (seconds.passed, memory.passed) == (True, False)
    assert result["peak_bytes"] == 9 * 2**30
    candidates = [{"verdict": "fits", "needed_bytes": 1}] * 60 + [{"verdict": "implied"}] * 39
    monkeypatch.setattr(planner_speed, "watched", lambda *_: ran({"search": {"candidates": candidates}}, 299.0, 1))
    result, (seconds, enough) = planner_speed.search()
    assert (seconds.passed, enough.passed) == (True, False)
    assert result["verdicts"] == {"fits": 60, "implied": 39}
    assert "99 configurations, 60 forecast" in seconds.detail

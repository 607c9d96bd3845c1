"""What a benchmark sees of a program from outside."""

import pytest

from benchmarks.common.launch import JobFailed
from benchmarks.common.process_tree import Ran, watched
from benchmarks.plans import planner_speed

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
    assert 0 < alone.cpu_s < alone.wall_s + 0.5


def test_a_program_that_fails_is_told_in_its_last_line() -> None:
    with pytest.raises(JobFailed, match=r"^ValueError: no$"):
        watched(["-c", "raise ValueError('no')"], 60.0)


def test_a_program_without_end_is_ended_with_its_children() -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with pytest.raises(JobFailed, match="no end in time"):
        watched(["-c", child], 1.0)


def test_how_long_a_plan_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([Ran("answer", 20.0, 4.0, 9 * MIB, 1), Ran("answer", 1.6, 0.5, MIB, 1)])
    monkeypatch.setattr(planner_speed, "watched", lambda *_: next(runs))
    monkeypatch.setenv("SHARDWISE_PLAN_CACHE", "0")
    result, (cold, warm) = planner_speed.measure("8b", "cpu")
    assert (cold.passed, warm.passed) == (True, True)
    assert result["cold"]["wall_s"] == 20.0
    assert "wall 20.0 s, processor 4.0 s" in cold.detail
    runs = iter([Ran("answer", 20.0, 4.0, 1, 1), Ran("answer", 2.6, 0.5, 1, 1)])
    assert [target.passed for target in planner_speed.measure("8b", "wall")[1]] == [False, False]
    runs = iter(Ran("answer", seconds, 0.5, 1, 1) for seconds in (20.0, 2.6, 7.0, 1.0))
    assert [target.passed for target in planner_speed.measure("8b", "wall", repeat=2)[1]] == [True, True]
    runs = iter([Ran("answer", 1.0, 1.0, 1, 1), Ran("another", 1.0, 1.0, 1, 1)])
    with pytest.raises(RuntimeError, match="the second answer is another one"):
        planner_speed.measure("8b", "cpu")

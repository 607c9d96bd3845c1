"""kill -9 of one rank, or of all, at every change to files and at random moments: committed checkpoints survive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def _verdicts(kind: str, work: Path, **options: Any) -> list[dict[str, Any]]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])}
    command = [sys.executable, "-m", "tests.checkpoint.publish.crash_lab", kind, str(work), json.dumps(options)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("rank-1", {"collectives": "gloo"}),
        pytest.param("all-at-rank-0", {}, marks=pytest.mark.slow),
        pytest.param("rank-0", {"width": 100_000}, marks=pytest.mark.slow),  # its pages go past the page cache
        pytest.param("rank-0", {"asynchronous": True}, marks=pytest.mark.slow),
        pytest.param("rank-1", {"asynchronous": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_kill_at_every_change(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """At the first and last of equal calls in a row; `python -m tests.checkpoint.publish.crash_lab` has every one."""
    verdicts = _verdicts(kind, tmp_path, thorough=False, **options)
    assert [verdict for verdict in verdicts if verdict["problems"]] == []
    calls = {verdict["hit"].split()[3] for verdict in verdicts}
    assert {"pwrite", "fsync", "create", "write"} <= calls
    if kind.endswith("0"):  # it also makes, commits and drops
        assert {"mkdir", "posix_fallocate", "rename", "unlink", "rmdir"} <= calls
        resumed = {verdict["resumed"] for verdict in verdicts}
        assert {2, 3} <= resumed  # before the rename and after it
        # The dropping after an asynchronous save goes on beside the next one, which may be there before.
        assert resumed <= ({2, 3, 4} if options.get("asynchronous") else {2, 3})
    lived_on = {rank for verdict in verdicts for rank in verdict["survivors"]}
    assert lived_on == {"rank-0": {"1"}, "rank-1": {"0"}}.get(kind, set())


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_kill_at_a_random_moment(asynchronous: bool, tmp_path: Path) -> None:
    verdicts = _verdicts("moments", tmp_path, moments=6, asynchronous=asynchronous)
    assert [verdict["kill"]["victims"] for verdict in verdicts] == 2 * [[0], [1], [0, 1]]
    assert [verdict for verdict in verdicts if verdict["problems"]] == []
    assert all(verdict["hit"] for verdict in verdicts)

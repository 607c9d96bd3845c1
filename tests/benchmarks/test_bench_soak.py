"""A short form of `python benchmarks soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.steps.soak import soak


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_through_random_faults_ends_as_one_without(tmp_path: Path) -> None:
    seen, differences = soak(2, 1, tmp_path.resolve())
    assert differences == []
    assert sum(one.rounds for one in seen.values()) == 2

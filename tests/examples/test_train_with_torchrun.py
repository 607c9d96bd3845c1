"""The example of a training script trains, and goes on where it stopped at another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.rig import assert_shown, losses, torchrun


@pytest.mark.slow
def test_it_trains_and_goes_on(tmp_path: Path) -> None:
    first = torchrun(2, "examples/train_with_torchrun.py", tmp_path)
    assert_shown("A training script", first)
    assert first[0] == "from step 0"
    assert any(line.startswith("param_shards") for line in first)
    found = [*losses(first).values()]
    assert len(found) == 6
    assert found[-1] < 0.1 < found[0]
    (tmp_path / "runs/torchrun-example/step-000060").rename(tmp_path / "elsewhere")
    again = torchrun(1, "examples/train_with_torchrun.py", tmp_path)
    assert again[0] == "from step 40"
    assert list(losses(again)) == ["step 50", "step 60"]
    assert any(line.startswith("optimizer") for line in again), "what was loaded is held"

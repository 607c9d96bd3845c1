"""The example runs, and shows what it says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.examples.rig import assert_shown, losses

pytest.importorskip("shardwise.jax", reason="the extra jax is not installed")

SCRIPT = Path(__file__).parents[2] / "examples" / "jax_sharding.py"


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(SCRIPT), run_name="__main__")
    said = capsys.readouterr().out
    assert "A mesh of 8 cpu devices" in said
    assert "CPU 7" in said
    assert_shown("JAX", said.splitlines())
    found = [*losses(said.splitlines()).values()]
    assert len(found) == 10
    assert found[-1] < found[0] / 4
    all_gathers = [line for line in said.splitlines() if line.startswith("all-gather")]
    assert any("blocks.*.up.kernel" in line for line in all_gathers)

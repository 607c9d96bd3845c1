"""Pre-training that finds its learning rate: what it finds, and that the model is as before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.rig import assert_shown, losses, torchrun

pytestmark = pytest.mark.slow


def test_the_rate_that_is_found_beats_a_tenth_and_ten_times_of_it(tmp_path: Path) -> None:
    lines = torchrun(2, "examples/find_learning_rate.py", tmp_path)
    assert_shown("A learning rate from the data", lines)
    assert lines[0].endswith("; the model is as it was")
    lower, found, higher = (float(line.split("loss ")[1].split()[0]) for line in lines[1:])
    assert found < min(lower, higher)


def test_a_vision_transformer_tells_shapes_apart(tmp_path: Path) -> None:
    lines = torchrun(2, "examples/vision_transformer.py", tmp_path)
    assert_shown("A vision transformer", lines)
    assert losses(lines)["step 400"] < losses(lines)["step 50"]
    assert float(lines[-1].split(": ")[1].split(",")[0]) > 0.6

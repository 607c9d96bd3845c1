"""The short loop: its size, that it learns, resumes and answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.rig import EXAMPLES, assert_shown, lines_of_code, losses, torchrun


def test_it_is_as_short_as_its_name() -> None:
    assert lines_of_code(EXAMPLES / "loop_in_40_lines.py") <= 40


@pytest.mark.slow
def test_it_learns_and_goes_on(tmp_path: Path) -> None:
    first = torchrun(2, "examples/loop_in_40_lines.py", tmp_path)
    steps, answer = first[:10], first[10:]  # of as many lines as the model writes
    assert_shown("A loop in 40 lines", [*steps, ""], but_last=1)
    found = losses(steps)
    assert len(found) == 10
    assert found["step 200"] < 2 < 3 < found["step 20"]
    assert any(answer)
    (tmp_path / "runs/loop-example/step-000200").rename(tmp_path / "elsewhere")
    again = torchrun(2, "examples/loop_in_40_lines.py", tmp_path)
    assert again == first[5:], "the second half is the same, and so is the answer"

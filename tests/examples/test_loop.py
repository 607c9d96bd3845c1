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
    assert_shown("A loop in 40 lines", first[:11], but_last=1)  # the answer has as many lines as the model writes
    found = losses(first[:10])
    assert len(found) == 10
    assert found["step 200"] < 2 < 3 < found["step 20"]
    assert any(first[10:])
    (tmp_path / "runs/loop-example/step-000200").rename(tmp_path / "elsewhere")
    again = torchrun(2, "examples/loop_in_40_lines.py", tmp_path)
    assert again == first[5:], "the second half is the same, and so is the answer"

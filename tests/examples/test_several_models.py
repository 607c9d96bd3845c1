"""Scripts with two sharded models: teacher and student, generator and critic."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.rig import assert_shown, torchrun

pytestmark = pytest.mark.slow


def test_a_student_learns_more_from_a_teacher_than_from_the_data(tmp_path: Path) -> None:
    lines = torchrun(2, "examples/distillation.py", tmp_path)
    assert_shown("Teacher and student", lines)
    teacher, student, alone, best = (float(line.split(": loss ")[1].split()[0]) for line in lines[2:])
    assert best < teacher < best + 0.1
    assert student < best + 0.2
    assert alone > best + 1, "it knows its few rows by heart"


def test_a_generator_finds_the_ring(tmp_path: Path) -> None:
    lines = torchrun(2, "examples/gan.py", tmp_path)
    assert_shown("Two models and two optimizers", lines)
    distances, centres = zip(*(map(float, re.findall(r"(\d\.\d+) from", line)) for line in lines), strict=True)
    assert distances[-1] < 0.3 < distances[0]
    assert centres[-1] < 0.3

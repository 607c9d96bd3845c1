"""Benchmarks start as their first lines say: `python benchmarks/NAME.py`, from anywhere, without an installation."""

import re
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMMANDS = [path for path in sorted(BENCHMARKS.glob("*.py")) if f"python benchmarks/{path.name}" in path.read_text()]


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_a_file_that_is_started_finds_its_neighbours(path: Path) -> None:
    """Started as a file, Python looks for modules in its folder and not beside it."""
    text = path.read_text()
    first_use = re.search(r"^(from|import) benchmarks", text, re.MULTILINE)
    if first_use is not None:
        assert "sys.path[:0] = [" in text[: first_use.start()]

"""`python benchmarks NAME` starts every benchmark, from anywhere and without an installation."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, HERE, about

NAMES = {name: room for room, names in BENCHMARKS.items() for name in names}


def run(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", str(HERE), *words]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=60)


def test_without_a_name_all_are_listed(tmp_path: Path) -> None:
    """By an interpreter that has nothing installed."""
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    for name, room in NAMES.items():
        assert f"  {name} " in done.stdout
        assert about(room, name) in done.stdout


def test_an_unknown_name_is_one_line_and_status_2(tmp_path: Path) -> None:
    done = run(tmp_path, "perrs")
    assert done.returncode == 2
    assert done.stderr.startswith("unknown benchmark 'perrs'; known are peers, overhead, ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("name", "room"), NAMES.items())
def test_first_lines_say_how_it_is_started(name: str, room: str) -> None:
    text = (HERE / room / f"{name}.py").read_text(encoding="utf-8")
    assert f" benchmarks {name}" in text.partition('"""')[2].partition('"""')[0]
    assert "\ndef main(" in text


def test_modules_with_a_main_are_listed_or_are_ranks_of_others() -> None:
    """Those that are not listed are started with `-m` by one that is, or take arguments of their own."""
    for path in HERE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "\ndef main(" in text and path.stem not in NAMES and path.parent != HERE:
            assert '\nif __name__ == "__main__":' in text, path

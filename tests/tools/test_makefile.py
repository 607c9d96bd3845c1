"""The Makefile where an installation was interrupted, and what its commands name."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
def test_an_environment_whose_making_was_interrupted_is_completed(tmp_path: Path) -> None:
    """It has an interpreter and no pip yet. What would be downloaded fails here, which comes after that."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    venv.create(tmp_path / ".venv", with_pip=False)
    nowhere = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    ended = subprocess.run(
        ["make", ".venv/.run-done", f"PYTHON={sys.executable}"],
        cwd=tmp_path,
        env={**os.environ, **nowhere},
        capture_output=True,
        text=True,
    )
    assert ended.returncode != 0
    assert "No module named pip" not in ended.stderr
    assert "torch==2.13.0" in ended.stderr
    assert not (tmp_path / ".venv" / ".run-done").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
def test_the_tests_that_another_torch_runs_are_there() -> None:
    """Otherwise pytest runs none of them."""
    command = ["make", "--dry-run", "test-torch", "TORCH=2.15.0"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = [word for word in shown.split() if word.startswith("tests/")]
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
def test_a_run_of_the_quickstart_is_the_last_command() -> None:
    """So its last line, the path of its report, is that of `make train` (`tests/train/test_trainer.py`)."""
    shown = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", "train"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert shown.splitlines()[-1] == ".venv/bin/shardwise train quickstart"


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_an_environment_for_another_torch_is_of_one_python(version: str, tmp_path: Path) -> None:
    """Otherwise a second Python would run the first one's."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    command = ["make", "--dry-run", "test-torch", "TORCH=2.15.0", f"PYTHON={python}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"{python} -m venv .venv-torch-2.15.0-py{version}\n" in shown
    folders = {word.split("/")[0] for word in shown.split() if word.startswith(".venv-torch-")}
    assert folders == {f".venv-torch-2.15.0-py{version}"}

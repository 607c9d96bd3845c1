"""A short form of `python -m tests.fuzz.fuzz --inputs 100000`, in a process of its own, whose memory is limited."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.fuzz import MOST_BYTES, limited, outcome

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_damaged_files_end_in_typed_errors() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-m", "tests.fuzz.fuzz", "--inputs", "1500", "--seed", "1"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, f"{ended.stdout[-6000:]}\n{ended.stderr[-3000:]}"
    assert " 0 | " in ended.stdout


@pytest.mark.parametrize(
    ("read", "end"),
    [
        (lambda given: given, "read"),
        (lambda given: given["missing"], "KeyError at test_fuzz.py"),
        (lambda given: bytearray(2 * MOST_BYTES), "MemoryError at test_fuzz.py"),
        (lambda given: sys.exit(3), "SystemExit at test_fuzz.py"),
    ],
)
def test_what_is_a_fault(read, end) -> None:  # type: ignore[no-untyped-def]
    with limited():
        assert outcome(read, {}).startswith(end)

"""A run goes on when nobody can read its output any more."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

TALK = """
import sys
from shardwise.cli.process.standard_streams import outlive_readers
outlive_readers()
print("here", flush=True)
sys.stdin.readline()
print("nobody reads this")
print("nor that", file=sys.stderr, flush=True)
sys.stdout.flush()
open("went-on", "w").close()
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def talking(stdout: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", TALK], stdin=subprocess.PIPE, stdout=stdout, stderr=stdout, start_new_session=True
    )


@pytest.mark.parametrize("listening", ["terminal", "pipe"])
def test_a_run_goes_on_though_nobody_reads(listening: str) -> None:
    reading, writing = pty.openpty() if listening == "terminal" else os.pipe()
    process = talking(writing)
    os.close(writing)
    assert os.read(reading, 100).strip() == b"here"
    os.close(reading)
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.close()
    assert process.wait(20) == 0
    assert Path("went-on").exists()


def test_a_run_whose_standard_output_alone_is_closed_says_once_that_it_goes_on() -> None:
    """`shardwise train ... | head` closes standard output this way."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", TALK], stdin=subprocess.PIPE, stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    assert os.read(reading, 100).strip() == b"here"
    os.close(reading)
    _, said = process.communicate(b"\n", timeout=20)
    assert process.returncode == 0
    lines = said.decode().splitlines()
    assert lines[0] == "nor that" or "the run continues" in lines[0]
    assert sum("nobody reads standard output any more: the run continues" in line for line in lines) == 1
    assert len(lines) == 2


def test_words_come_as_they_were_printed() -> None:
    reading, writing = os.pipe()
    process = talking(writing)
    os.close(writing)
    assert process.stdin is not None
    threading.Timer(0, process.stdin.close).start()
    with os.fdopen(reading) as file:
        assert sorted(file.read().splitlines()) == ["here", "nobody reads this", "nor that"]
    assert process.wait(20) == 0


def test_errors_of_another_kind_are_raised() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with Path("/dev/full").open("wb") as full:
        process = talking(full.fileno())
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(20) != 0
    assert not Path("went-on").exists()

"""A search shows results so far: in place on a terminal, as lines elsewhere, and when it is interrupted."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, signal, sys, time
from shardwise.cli import searching
from shardwise.plan.search.search import Question
from shardwise.plan.search.exploration import Objective
from shardwise.plan.search.space import search_space
from shardwise.plan.search.sweeps import explore_sweep
from tests.plan.doubles import formula

searching._FIRST_LINE_S = 0.1
sweeps = search_space({"micro_batch": [1, 2], "strategy": ["full_shard"]}).sweeps
found = [c for sweep in sweeps for c in explore_sweep(sweep, formula, None, Objective.TOKENS_PER_S)]
with searching.Searching(Question("llama-3-8b")) as progress:
    print("started", file=sys.stderr, flush=True)
    for number, candidate in enumerate(found[: int(sys.argv[1])]):
        progress(number + 1, len(found), candidate)
    if sys.argv[2] == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.6)
assert "torch" not in sys.modules
print("over")
"""


def started(found: int, ending: str, stdout: int) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "100", "TERM": "xterm"}
    arguments = [sys.executable, "-c", PROGRAM, str(found), ending]
    return subprocess.Popen(arguments, stdout=stdout, stderr=subprocess.PIPE, env=environment)


def test_lines_where_nobody_watches() -> None:
    process = started(6, "", subprocess.PIPE)
    out, err = map(bytes.decode, process.communicate())
    assert (process.returncode, out) == (0, "over\n"), err
    assert "\nplanning: 6 of 8 configurations settled by " in err
    assert "best so far: " in err
    assert "tokens/s per GPU" in err


def test_a_table_that_improves_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    process = started(6, "", theirs)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # how a terminal says that the other end is closed
        pass
    assert process.communicate()[0] is None
    assert process.returncode == 0
    text = shown.decode()
    assert "tokens/s" in text
    assert "planning: 6 of 8 configurations" in text
    assert text.endswith("over\r\n")


@pytest.mark.parametrize("found", [0, 6])
def test_an_interrupt_says_what_is_known(found: int) -> None:
    process = started(found, "interrupt", subprocess.PIPE)
    out, err = map(bytes.decode, process.communicate())
    assert process.returncode == 128 + signal.SIGINT
    assert "interrupted; planning: " in err
    assert ("nothing that fits is known yet" in err) is (found == 0)
    assert out.startswith("strategy ") is (found > 0)
    assert "over" not in out

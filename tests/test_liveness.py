"""How a process ended, as others of its machine can tell."""

import subprocess
import sys

import pytest

from shardwise.liveness import birth, ending


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("sys.exit()", "exited with status 0"),
        ("sys.exit(3)", "exited with status 3"),
        ("os.abort()", "was killed by SIGABRT"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL; the machine may be out of memory"),
    ],
)
def test_how_a_process_ended_is_known_until_its_parent_is_told(end: str, said: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", f"import os, sys; print(flush=True); input(); {end}"], **PIPES)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    born = birth(process.pid)
    assert born > 0
    process.stdin.write(b"\n")
    process.stdin.close()
    while birth(process.pid) == born:
        pass
    assert ending(process.pid, born) == said
    assert ending(process.pid, born - 1) == "is gone"  # another process had this number before
    process.wait()
    assert ending(process.pid, born) == "is gone"
    process.stdout.close()


PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}

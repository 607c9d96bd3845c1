"""A program, timed and watched from outside: the memory of it and of everything that it starts."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from benchmarks import ROOT
from benchmarks.common.launch import JobFailed, environment

POLL_S = 0.05


@dataclass(frozen=True)
class Ran:
    """How a program went."""

    output: str
    """On standard output."""
    wall_s: float
    cpu_s: float
    """Processor seconds of all its processes that it waited for."""
    peak_bytes: int
    """The sum over all its processes of each one's own largest resident set: never less than they held at once."""
    processes: int
    largest_bytes: int = 0
    """The largest of these resident sets."""


def watched(command: list[str], timeout_s: float) -> Ran:
    """Run a Python command line to its end. Needs Linux's /proc.

    Raises:
        JobFailed: it ended with an error, or not in time.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:  # a pipe could fill and block
        started_s, used_s = time.monotonic(), _children_cpu_s()
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment(), stdout=out, stderr=errors)
        peaks = _peaks_until_it_ends(process, started_s + timeout_s)
        wall_s, cpu_s = time.monotonic() - started_s, _children_cpu_s() - used_s
        output, said = (_text(file) for file in (out, errors))
    if process.returncode:
        last = (said.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        raise JobFailed(last, said)
    return Ran(output, wall_s, cpu_s, sum(peaks.values()), len(peaks), max(peaks.values(), default=0))


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _text(file: TextIO) -> str:
    file.seek(0)
    return file.read()


def _peaks_until_it_ends(process: subprocess.Popen[bytes], until_s: float) -> dict[int, int]:
    """Largest resident sets by process. The kernel keeps the maximum, so nothing between two looks is missed."""
    peaks: dict[int, int] = {}
    while process.poll() is None:
        if time.monotonic() > until_s:
            for pid in reversed(_family(process.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            raise JobFailed("no end in time")
        for pid in _family(process.pid):
            peaks[pid] = max(peaks.get(pid, 0), _peak_bytes(pid))
        time.sleep(POLL_S)
    return peaks


def _family(root: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def _peak_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)

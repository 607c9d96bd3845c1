"""Runs checks one after another, each in a process of its own, within a budget of time.

A check that raises, crashes, hangs or loses its device ends no other check. After a crash or a lost device the check's
remaining cases are run in a fresh process.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks import ROOT
from benchmarks.accelerator.check import Check
from benchmarks.accelerator.row import Row, Verdict, failed, not_run, row_of

OUT_OF_TIME = "out of time"
_LEAST_S = 8.0
"""Less than this is not worth a process."""
_TAIL_BYTES = 6000
_DRAIN_S = 5.0
_REASON_LINES = 3

Tell = Callable[[str, Row], None]


@dataclass
class Told:
    """What a check's processes have said so far."""

    planned: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    @property
    def interrupted(self) -> str | None:
        """The case that began and did not end."""
        return next((name for name in self.begun if name not in self.ended), None)

    @property
    def unbegun(self) -> list[str]:
        return [name for name in self.planned if name not in self.begun]


@dataclass
class Runner:
    """Runs checks until the budget is spent."""

    folder: Path
    """Where checks leave files of the result."""
    tell: Tell
    """Called with the check's name and each row, at once."""
    quick: bool = False
    budget_s: float = 520.0
    logs: dict[str, str] = field(default_factory=dict)
    """The end of what failing checks printed."""

    def __post_init__(self) -> None:
        self._end_s = time.monotonic() + self.budget_s

    def run(self, check: Check) -> list[Row]:
        """Its rows. Every case that it has leaves at least one."""
        told = Told()
        least_s = min(_LEAST_S, check.limit_s / 4)
        end_s = min(self._end_s, time.monotonic() + check.limit_s)
        if end_s - time.monotonic() < least_s:
            self._add(check, told, not_run("all", OUT_OF_TIME))
            return told.rows
        left = OUT_OF_TIME
        while True:
            before = len(told.ended)
            status, log, in_time = self._process(check, told, end_s)
            if status == 0 and in_time:
                break
            self.logs[check.name] = log
            self._explain(check, told, _cause(status, log, in_time))
            if in_time and len(told.ended) == before:
                left = "the check's process ended before"
                break
            if not told.unbegun or end_s - time.monotonic() < least_s:
                break
        for name in told.unbegun:
            self._add(check, told, not_run(name, left))
        return told.rows

    def _explain(self, check: Check, told: Told, cause: str) -> None:
        """A case that was cut off failed, unless it said so itself; it is over now."""
        name = told.interrupted
        if not any(row.name == name and row.verdict == Verdict.FAIL for row in told.rows):
            self._add(check, told, failed(name or "start", cause))
        if name is not None:
            told.ended.append(name)

    def _add(self, check: Check, told: Told, row: Row) -> None:
        told.rows.append(row)
        self.tell(check.name, row)

    def _process(self, check: Check, told: Told, end_s: float) -> tuple[int, str, bool]:
        """Run the cases that have not begun. Returns the exit status, the end of what was printed, and whether the
        process ended in time."""
        limit_s = end_s - time.monotonic()
        read, write = os.pipe()
        command = [sys.executable, "-m", "benchmarks.accelerator.child", check.module, "--pipe", str(write)]
        command += ["--limit-s", f"{limit_s:.1f}", "--folder", str(self.folder), "--skip", json.dumps(told.begun)]
        command += ["--quick"] if self.quick else []
        with tempfile.TemporaryFile() as log, os.fdopen(read) as pipe:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(**check.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                start_new_session=True,
            )
            os.close(write)
            listener = threading.Thread(target=self._listen, args=(check, told, pipe), daemon=True)
            listener.start()
            in_time = _wait(process, limit_s)
            listener.join(_DRAIN_S)
            status = -signal.SIGKILL if process.returncode is None else process.returncode
            return status, _tail(log), in_time

    def _listen(self, check: Check, told: Told, pipe: IO[str]) -> None:
        for line in pipe:
            said: dict[str, Any] = json.loads(line)
            if "row" in said:
                self._add(check, told, row_of(said["row"]))
            told.planned.extend(name for name in said.get("cases", ()) if name not in told.planned)
            if "begin" in said:
                told.begun.append(said["begin"])
            if "end" in said:
                told.ended.append(said["end"])


def environment(**extra: str) -> dict[str, str]:
    """Of a check's process: this source tree first, no network, and one thread where nobody asks for more, so that
    times are the engine's and a busy CPU is not waited for."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    fixed = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {"OMP_NUM_THREADS": "1", **os.environ, **fixed, **extra}


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Whether it ended by itself. Its own children end with it either way."""
    try:
        process.wait(limit_s)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver's call may hold it; then it is left to itself
            process.wait(_DRAIN_S)


def _tail(log: IO[bytes]) -> str:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - _TAIL_BYTES))
    return log.read().decode(errors="replace")


def _cause(status: int, log: str, in_time: bool) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = " / ".join(lines[-_REASON_LINES:])
    if not in_time:
        return f"no end within its time; {_stuck(lines) or last}"
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"crashed by {signal.Signals(-status).name}; {last}"
    return f"exit status {status}; {last}"


def _stuck(lines: list[str]) -> str:
    """Where this source tree's code stood when the stacks were written."""
    own = [line for line in lines if line.startswith(f'File "{ROOT}') and "site-packages" not in line]
    return f"it stood at {own[0].replace(str(ROOT) + os.sep, '')}" if own else ""

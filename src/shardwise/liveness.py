"""Whether the process with a given id on this machine is still the same process, and how it ended if it is not."""

from __future__ import annotations

import os
import signal
from pathlib import Path

_START, _EXIT_CODE = 19, 49
"""Positions in /proc/PID/stat after the name, which may hold spaces: fields 22 and 52 of proc(5)."""


def birth(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; -1 if it has ended (also if it was not reaped yet)."""
    fields = _stat(pid)
    return -1 if not fields or fields[0] in (b"Z", b"X") else int(fields[_START])


def ending(pid: int, born: int) -> str:
    """Return how a process ended, as the end of a sentence: "was killed by SIGKILL", "exited with status 1", or "is
    gone" if its parent has been told already. Call it when `birth(pid)` is no longer `born`."""
    fields = _stat(pid)
    if not fields or fields[0] != b"Z" or int(fields[_START]) != born:
        return "is gone"
    return in_words(os.waitstatus_to_exitcode(int(fields[_EXIT_CODE])))


def in_words(status: int) -> str:
    """Return the words for an exit status, or for the negative number of the signal that ended a process."""
    if status >= 0:
        return f"exited with status {status}"
    hint = "; the machine may be out of memory" if status == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-status).name}{hint}"


def _stat(pid: int) -> list[bytes]:
    """Return the fields of a process's status after its name; none if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def machine() -> str:
    """Return a name of the boot and the PID namespace: where it is equal, process ids mean the same processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"

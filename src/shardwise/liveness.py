"""Whether a process of this machine is still the one that it was."""

from __future__ import annotations

from pathlib import Path


def birth(pid: int) -> int:
    """When a process started, in clock ticks since boot; -1 if it is gone or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])


def machine() -> str:
    """A name that is the same wherever process ids mean the same processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"

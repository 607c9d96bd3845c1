"""Whether the process with a given id on this machine is still the same process, or the id was reused."""

from __future__ import annotations

from pathlib import Path


def birth(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; -1 if it has ended (also if it was not reaped yet)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])


def machine() -> str:
    """Return a name of the boot and the PID namespace: where it is equal, process ids mean the same processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"

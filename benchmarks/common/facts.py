"""Facts about this machine and its software that a result file must carry; nothing that names the machine."""

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from benchmarks import ROOT


def _proc_field(path: str, pattern: str) -> str | None:
    try:
        found = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except OSError:
        return None
    return found.group(1).strip() if found else None


def peak_rss_bytes() -> int:
    """Return the largest resident set of this process so far (VmHWM), shared pages it touched included."""
    kib = _proc_field("/proc/self/status", r"^VmHWM:\s+(\d+) kB")
    if kib is None:
        raise RuntimeError("peak RSS needs VmHWM of /proc/self/status, which only Linux has")
    return 1024 * int(kib)


def version(package: str) -> str | None:
    """Return an installed package's version, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _revision() -> str | None:
    """The checkout's commit, with a plus sign if tracked files were changed since."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def machine() -> dict[str, Any]:
    """Return processor, memory and versions, for a result file."""
    kib = _proc_field("/proc/meminfo", r"^MemTotal:\s+(\d+) kB")
    return {
        "cpu": _proc_field("/proc/cpuinfo", r"^model name\s*:\s*(.+)$") or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(int(kib) / 2**20, 1) if kib else None,
        "python": platform.python_version(),
        "torch": version("torch"),
        "deepspeed": version("deepspeed"),
        "shardwise_revision": _revision(),
    }

"""The processor cores that this process may run on."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Return how many cores this process may run on: fewer than the machine has, if it was bound to some."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    return bound or os.cpu_count() or 1

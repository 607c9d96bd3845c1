"""Freed host memory that the C library has not returned to the system."""

from __future__ import annotations

import ctypes

_trim: ctypes._NamedFuncPointer | None = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back_freed() -> None:
    """Return to the system the memory that this process has freed.

    If small allocations stay between large ones that are freed, as an optimizer's counters do in its first step, later
    large allocations do not fit into the gaps, and the process grows by all that was ever allocated. Takes about a
    millisecond. Does nothing where the C library has no `malloc_trim` (glibc has it).
    """
    if _trim is not None:
        _trim(0)

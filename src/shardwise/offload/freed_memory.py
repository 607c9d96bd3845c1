"""Memory of the host that was freed, and that C's library keeps."""

from __future__ import annotations

import ctypes

_trim: ctypes._NamedFuncPointer | None = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back_freed() -> None:
    """Have the system get what this process has freed.

    Where something small stays between large pieces that go, as an optimizer's counters do in a first step, the next
    large pieces find no room among the old ones: the process grows by all that was ever made. Takes a millisecond; does
    nothing where the library (glibc has it) cannot.
    """
    if _trim is not None:
        _trim(0)

"""The C library's heap, on ranks that compute on CPUs.

A step frees its activations and the next one wants them again. glibc gives free memory at the top of its heap back to
the system, which then clears every page anew: 30 to 100 ms of a 3.5 s step of 98 M parameters. A GPU's allocator keeps
such memory too. The peak stays what it is.
"""

from __future__ import annotations

import ctypes
import os

from shardwise.errors import ConfigError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGEST_IN_HEAP = 32 * 2**20
"""Bytes from which on an allocation is a mapping of its own; as far as glibc goes by itself."""


def keep_freed_memory() -> None:
    """Have this process keep what it frees, mappings of 32 MiB and more excepted, for allocations to come. Local.

    Nothing happens where the user chose (`SHARDWISE_KEEP_FREED=0`, or any of glibc's own settings of malloc in the
    environment), or under another C library.

    Raises ConfigError for a `SHARDWISE_KEEP_FREED` that is neither 0 nor 1.
    """
    asked = os.environ.get("SHARDWISE_KEEP_FREED", "1")
    if asked not in {"0", "1"}:
        raise ConfigError(f"SHARDWISE_KEEP_FREED={asked!r}: 1 or 0")
    settings = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
    chosen = any(name in os.environ for name in settings) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if chosen or asked == "0":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP)  # any of the two switches glibc's own adjustment of both off
        mallopt(_M_TRIM_THRESHOLD, _NEVER)

"""How long ranks wait for one another."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardwise.errors import ConfigError

if TYPE_CHECKING:
    import torch.distributed as dist


_DEFAULT_S = 1800.0
"""Torch's default. For process groups without options: torch's `fake` one, or one implemented in Python."""


def timeout_s(group: dist.ProcessGroup) -> float:
    """Return the seconds to wait for a peer: `SHARDWISE_TIMEOUT_S`, else the process group's own timeout.

    Raises:
        ConfigError: the variable is not a positive number.
    """
    asked = os.environ.get("SHARDWISE_TIMEOUT_S")
    if not asked:
        kinds = group._device_types
        options = group._get_backend(kinds[0]).options if kinds else None
        return _DEFAULT_S if options is None else options._timeout.total_seconds()
    try:
        seconds = float(asked)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError(f"SHARDWISE_TIMEOUT_S={asked!r} is not a number of seconds") from None
    return seconds

"""What the doors for other engines' scripts share."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

from torch import nn

from shardwise.engine.lookup import engine_of


def allow_autocast(module: nn.Module) -> None:
    """Around fp32 units, as torch's engines take it: cast copies of weights then stay until backward."""
    if (engine := engine_of(module, below=False)) is not None:
        engine.refuses_autocast = False


def mixed_class(mixin: type, kind: type, name: str) -> Any:
    """A class that is both, the mixin first. The same each time."""
    return _mixed((mixin, kind), name)


@cache
def _mixed(bases: Any, name: str) -> type:
    kind = bases[1]
    inherited = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    return type(name, bases, inherited)


@cache
def without_effect(what: str, why: str) -> None:
    """Warn, once."""
    warnings.warn(f"shardwise: {what} has no effect: {why}", stacklevel=3)

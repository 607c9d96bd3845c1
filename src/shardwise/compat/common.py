"""Helpers shared by the modules that take FSDP scripts."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

from torch import nn

from shardwise.engine.extensions.autocast import allow_autocast as lift_check
from shardwise.engine.lookup import engine_of


def allow_autocast(module: nn.Module) -> None:
    """Allow autocast around fp32 units, as torch's engines do. Its cast copies of weights stay until backward."""
    if (engine := engine_of(module, below=False)) is not None:
        lift_check(engine)


def mixed_class(mixin: type, kind: type, name: str) -> Any:
    """Return a class that derives from both, the mixin first. Returns the same class each time."""
    return _mixed((mixin, kind), name)


@cache
def _mixed(bases: Any, name: str) -> type:
    kind = bases[1]
    inherited = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    return type(name, bases, inherited)


@cache
def without_effect(what: str, why: str) -> None:
    """Warn, once per `what`, that it has no effect."""
    warnings.warn(f"shardwise: {what} has no effect: {why}", stacklevel=3)

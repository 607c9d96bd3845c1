"""torch.compile leaves the engine's own code alone."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import cache

import torch

from shardwise.engine.checked import CheckedEngine

_UNCOMPILED = ("shardwise.fsdp", "shardwise.engine", "shardwise.sharded")


def leave_uncompiled() -> None:
    """Keep torch.compile from compiling the engine and sharded parameters, if it was imported.

    When the whole model or `optimizer.step` is compiled, Dynamo runs what autograd and torch's dispatcher call, too:
    it would compile saved-tensor hooks until it meets its `recompile_limit`, and the dispatch of sharded parameters
    once for each operation, which takes a minute and makes nothing faster.
    """
    if "torch._dynamo" in sys.modules:
        _skip_our_files()


@cache
def _skip_our_files() -> None:
    for name in _UNCOMPILED:
        with suppress(AttributeError):  # private to torch, and only saves time
            torch._dynamo.trace_rules.add(name)


def attach(engine: CheckedEngine) -> None:
    """Called with each engine that has its units."""
    engine.hooks.begin_step.append(leave_uncompiled)

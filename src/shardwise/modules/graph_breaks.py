"""Code that torch.compile must not trace."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch

_UNCOMPILED = ("shardwise.engine", "shardwise.sharded")


def hide_from_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make torch.compile break the graph at this function: hooks traced into a graph would run only while tracing."""
    return torch._disable_dynamo(function, recursive=True)  # type: ignore[attr-defined]


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

"""Where torch.compile may not look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def hide_from_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make torch.compile break the graph here: hooks traced into a graph would run once, at tracing."""
    return torch._disable_dynamo(function, recursive=True)  # type: ignore[attr-defined]

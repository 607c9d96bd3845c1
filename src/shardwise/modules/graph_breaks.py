"""Code that torch.compile must not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def hide_from_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make torch.compile break the graph at this function: hooks traced into a graph would run only while tracing."""
    return torch._disable_dynamo(function, recursive=True)  # type: ignore[attr-defined]

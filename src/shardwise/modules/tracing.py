"""Code that torch.compile and the transforms of torch.func must not see."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

_transform: Callable[[], object] = torch._C._functorch.peek_interpreter_stack


def hide_from_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make torch.compile break the graph at this function: hooks traced into a graph would run only while tracing."""
    return torch._disable_dynamo(function, recursive=True)  # type: ignore[attr-defined]


def is_transforming() -> bool:
    """Whether a torch.func transform is under way."""
    return _transform() is not None


def outside_transforms(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run the function outside any transform (jvp) that is under way, which would wrap the views that slots cache."""

    @wraps(function)
    def run(*args: Any) -> Any:
        if _transform() is None:
            return function(*args)
        with temporarily_clear_interpreter_stack():
            return function(*args)

    return run

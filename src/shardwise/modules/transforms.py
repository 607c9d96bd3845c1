"""Code that must not run inside a torch.func transform (jvp), which would wrap the views that slots cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

_transform: Callable[[], object] = torch._C._functorch.peek_interpreter_stack


def are_none() -> bool:
    """Whether no transform is under way."""
    return _transform() is None


def outside_transforms(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run the function outside any transform that is under way."""

    @wraps(function)
    def run(*args: Any) -> Any:
        if _transform() is None:
            return function(*args)
        with temporarily_clear_interpreter_stack():
            return function(*args)

    return run

"""What is dispatched on plain tensors: on a device each one is a launch, except views, and a foreach is one.

with counted() as names:
    clip()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.sharded.parameter import ShardedParameter


@contextmanager
def counted() -> Iterator[list[str]]:
    """Yields the names of the operations inside, in order. Those on wrappers, which compute nothing, are left out."""
    names: list[str] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if ShardedParameter in types:
                return NotImplemented  # it comes back with what is inside
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Count():
        yield names

"""Counting of operations dispatched on plain tensors: on a device each is one launch (foreach too), except views.

with counted() as names:
    clip()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.fsdp.sharded_parameter import ShardedParameter


@contextmanager
def counted() -> Iterator[list[str]]:
    """Yield the names of the operations in the block, in order, without those on wrappers, which compute nothing."""
    names: list[str] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if ShardedParameter in types:
                return NotImplemented  # it comes back with what is inside
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Count():
        yield names

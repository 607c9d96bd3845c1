"""Models of the meta device whose numbers come after they are sharded, as FSDP2's scripts have it: `to_empty`, then
`init_weights` or a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.sharded.parameter import ShardedParameter

_inside: ContextVar[bool] = ContextVar("inside", default=False)


@contextmanager
def put_off() -> Iterator[None]:
    """Inside, `sw.shard` draws no numbers for what is on the meta device. Shards are laid out, and their parameters say
    that they are on the meta device, until something is written to them or `to_empty` is called; buffers stay there
    until then. Every rank must shard inside it, or none."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def is_put_off() -> bool:
    """Whether it is inside `put_off`."""
    return _inside.get()


def blank_(tensor: Tensor) -> Tensor:
    """Fill with NaN, or with zero where that cannot be: what somebody forgets to initialise is then seen."""
    return tensor.fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0)


@torch.no_grad()
def come(module: nn.Module, empty_like: Callable[[Tensor], Tensor]) -> None:
    """`to_empty`: have the parameters and buffers of a module and below it in memory, without numbers. Those that were
    written since stay as they are. No communication."""
    _give_buffers(module, empty_like)
    for below in module.modules():
        held: dict[str, Any] = below._parameters
        for parameter in held.values():
            if isinstance(parameter, ShardedParameter):
                parameter.put_off_at = None
            elif parameter is not None and parameter.is_meta:  # it was to be left alone, and is known as this object
                real = nn.Parameter(blank_(empty_like(parameter.detach())), requires_grad=parameter.requires_grad)
                torch.utils.swap_tensors(parameter, real)


def give_buffers(module: nn.Module, device: torch.device) -> None:
    """Have the buffers of a module and below it in memory on `device`, without numbers: a checkpoint is going to write
    them. No communication."""
    _give_buffers(module, lambda buffer: torch.empty_like(buffer, device=device))


@torch.no_grad()
def _give_buffers(module: nn.Module, empty_like: Callable[[Tensor], Tensor]) -> None:
    made: dict[Tensor, Tensor] = {}  # a buffer in two places stays one
    for below in module.modules():
        for name, buffer in below._buffers.items():
            if buffer is not None and buffer.is_meta:
                if buffer not in made:
                    made[buffer] = blank_(empty_like(buffer))
                below._buffers[name] = made[buffer]

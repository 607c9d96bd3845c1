"""Models that stay on the meta device while they are sharded and get their values later, as in FSDP2's scripts: by
`to_empty` and then `init_weights` or a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.fsdp.sharded_parameter import ShardedParameter, add_methods

_COUNTER = "_shardwise_deferred"
"""Attribute of a parameter without numbers: what counts writes to its memory, and the count now."""
_inside: ContextVar[bool] = ContextVar("inside", default=False)


@contextmanager
def defer_init() -> Iterator[None]:
    """A context in which `sw.shard` does not initialise parameters and buffers on the meta device.

    Shards are allocated, but their parameters report the meta device until they are written to or `to_empty` is called.
    Buffers stay on the meta device until then. Either every rank must call `sw.shard` inside it, or none.
    """
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def is_deferred() -> bool:
    """Whether the caller is inside `defer_init`."""
    return _inside.get()


class Counter(Protocol):
    """Counts the writes to some memory."""

    @property
    def _version(self) -> int:
        """Grows with each write, as a tensor's does."""


def have_no_numbers(parameters: Iterable[ShardedParameter], writes: Counter) -> None:
    """Let parameters report the meta device until their memory, whose writes are counted, is written."""
    _report_meta()
    for parameter in parameters:
        parameter.__dict__[_COUNTER] = (writes, writes._version)


@cache
def _report_meta() -> None:
    """Let sharded parameters report whether they have numbers. Before some have none torch reports the device, which is
    faster."""

    def device(parameter: ShardedParameter) -> torch.device:
        writes, version = parameter.__dict__.get(_COUNTER, (None, None))
        if writes is not None and writes._version == version:
            return torch.device("meta")
        return parameter.stored_device

    add_methods(device=property(device))


def fill_nan_(tensor: Tensor) -> Tensor:
    """Fill a tensor with NaN, or with zero if its dtype has no NaN, so that a missing initialisation is noticed."""
    return tensor.fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0)


@torch.no_grad()
def materialize_empty(module: nn.Module, empty_like: Callable[[Tensor], Tensor]) -> None:
    """Do `to_empty`: give the meta parameters and buffers of a module and of all modules below it memory, filled by
    `fill_nan_`. Shards are already allocated and only stop reporting the meta device. Does not communicate."""
    _give_buffers(module, empty_like)
    for below in module.modules():
        held: dict[str, Any] = below._parameters
        for parameter in held.values():
            if isinstance(parameter, ShardedParameter):
                parameter.__dict__.pop(_COUNTER, None)
            elif parameter is not None and parameter.is_meta:  # ignored by sw.shard, which knows it as this object
                real = nn.Parameter(fill_nan_(empty_like(parameter.detach())), requires_grad=parameter.requires_grad)
                torch.utils.swap_tensors(parameter, real)


def give_buffers(module: nn.Module, device: torch.device) -> None:
    """Give the meta buffers of a module and of all modules below it memory on `device`, filled by `fill_nan_`; a
    checkpoint will write them. Does not communicate."""
    _give_buffers(module, lambda buffer: torch.empty_like(buffer, device=device))


@torch.no_grad()
def _give_buffers(module: nn.Module, empty_like: Callable[[Tensor], Tensor]) -> None:
    made: dict[Tensor, Tensor] = {}  # a buffer in two places stays one
    for below in module.modules():
        for name, buffer in below._buffers.items():
            if buffer is not None and buffer.is_meta:
                if buffer not in made:
                    made[buffer] = fill_nan_(empty_like(buffer))
                below._buffers[name] = made[buffer]

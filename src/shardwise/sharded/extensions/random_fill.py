"""Random initialisation of sharded parameters: each rank keeps its piece of the numbers that the unsharded tensor would
get.

So `reset_parameters` and `init_weights` after `sw.shard` give the numbers of an unsharded model, at any number of
ranks. All ranks draw from rank 0's generator state, which is broadcast; afterwards the others get their own state back.
Each rank draws the whole tensor, as each would without sharding, and keeps only its piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from shardwise import device_tools
from shardwise.errors import NotOnPiecesError
from shardwise.fsdp.sharded_parameter import Handler, ShardedParameter, register_operations


def attach() -> None:
    """Let random numbers fill sharded parameters in place."""
    register_operations(_handler)


def _handler(func: OpOverload) -> Handler | None:
    first = func._schema.arguments[0]
    fills = first.name == "self" and first.alias_info is not None and first.alias_info.is_write
    return _fill if fills and torch.Tag.nondeterministic_seeded in func.tags else None


def _fill(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ShardedParameter:
    target = args[0]
    plain = not any(isinstance(value, ShardedParameter) for value in (*args[1:], *kwargs.values()))
    name = func._schema.name.replace("::", ".")
    if not isinstance(target, ShardedParameter) or not plain or target.placement.replicas is None:
        raise NotOnPiecesError(
            f"{name} can fill only a parameter of a sharded model, and no other argument may be sharded"
        )
    parameter = target.parameter
    if parameter is not None and parameter.unit is not None and parameter.unit.is_running:
        raise NotOnPiecesError(
            f"{name} cannot fill the sharded parameter {parameter.fqn!r} inside a forward of its model"
        )
    replicas, shards = target.placement.replicas, target.placement.shard_group
    whole = torch.empty(target.shape, dtype=target.local.dtype, device=target.local.device)
    generator = _Generator(kwargs.get("generator"), whole.device)
    own = generator.state
    first = own.to(whole.device, copy=True)
    replicas.broadcast(first, 0)
    shards.broadcast(first, 0)
    first = first.cpu()
    is_shared = torch.equal(first, own)
    generator.set(first)
    try:
        func(whole, *args[1:], **kwargs)
    finally:
        if not is_shared:
            generator.set(own)
    target.copy_(whole)
    result: ShardedParameter = target
    return result


class _Generator:
    """The generator that a call draws from: the one that it was given, or the device's default."""

    def __init__(self, given: torch.Generator | None, device: torch.device) -> None:
        self._given = given
        self._device = device

    @property
    def state(self) -> Tensor:
        """The generator's state: bytes, on the CPU."""
        return device_tools.random_state(self._device) if self._given is None else self._given.get_state()

    def set(self, state: Tensor) -> None:
        """Set the generator's state."""
        if self._given is None:
            device_tools.set_random_state(self._device, state)
        else:
            self._given.set_state(state)

"""The optimizer's step when some of its state, or of its parameters' shards or gradients, rests on a tier."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from shardwise.comm.together import Doing
from shardwise.fsdp.collectives import Collectives
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.offload.host_step import HostStep
from shardwise.offload.shard_store import BUFFERS, slices_for_step
from shardwise.offload.state_store import StateStore
from shardwise.offload.stores import of_owner
from shardwise.sharded.extensions.offloaded import Slice
from shardwise.sharded.extensions.partial_step import by_owner, step_some

_STEP = "the optimizer's step"


def step_with_stores(optimizer: Optimizer, selected: Sequence[Sequence[Tensor]]) -> None:
    """Take the optimizer's step for some of its parameters, wherever their state, shards and gradients rest.

    If any rest on a tier, every rank must call this. All ranks raise if one does; if one raises while it prepares,
    they do so before anything is updated. Otherwise does not communicate.
    """
    groups = _groups_of(selected)
    stores = stores_of(optimizer)
    with Doing(groups, _STEP).together():
        for store in stores:
            store.check(optimizer)
            store.prepare(optimizer)
    stored: dict[StateStore | HostStep, list[ShardedParameter]] = {}
    offloaded: dict[tuple[Slice, ...], list[list[Tensor]]] = {}
    for number, some in enumerate(selected):
        for parameter in some:
            own: StateStore | HostStep | None = store_of(parameter) or host_step_of(parameter)
            if own is None:
                slices = slices_for_step(parameter)
                offloaded.setdefault(slices, [[] for _ in optimizer.param_groups])[number].append(parameter)
            elif parameter.grad is not None:
                assert isinstance(parameter, ShardedParameter)
                stored.setdefault(own, []).append(parameter)
    with Doing(groups, _STEP).together():
        _step_by_slices(optimizer, offloaded)
        for stepping, parameters in stored.items():
            stepping.step(optimizer, parameters)


def _step_by_slices(optimizer: Optimizer, by_slices: Mapping[tuple[Slice, ...], list[list[Tensor]]]) -> None:
    """Step parameters whose state is in memory: those that are not offloaded all at once, others slice by slice."""
    order = [
        own for own, some in by_slices.items() if not own or any(p.grad is not None for p in itertools.chain(*some))
    ]
    for index, slices in enumerate(order):
        for each in itertools.chain(*order[index : index + BUFFERS]):
            each.read_ahead()
        step_some(optimizer, by_slices[slices])


def store_of(parameter: Tensor) -> StateStore | None:
    """Return the store that keeps the parameter's state, or None if the state is where the optimizer put it."""
    return of_owner(parameter.unit).states if isinstance(parameter, ShardedParameter) else None


def host_step_of(parameter: Tensor) -> HostStep | None:
    """Return what takes the parameter's step on the host, or None if the device does."""
    return of_owner(parameter.unit).host_step if isinstance(parameter, ShardedParameter) else None


def stores_of(optimizer: Optimizer) -> list[StateStore]:
    """Return all stores that keep state of the optimizer's parameters."""
    states = (of_owner(unit).states for unit in by_owner(optimizer))
    return list(dict.fromkeys(store for store in states if store is not None))


def _groups_of(selected: Sequence[Sequence[Tensor]]) -> list[Collectives]:
    """Return the groups of ranks that step these parameters together, where a tier may fail on one rank alone."""
    groups: dict[Collectives, None] = {}
    for parameter in itertools.chain(*selected):
        if isinstance(parameter, ShardedParameter) and any(of_owner(parameter.unit)):
            for group in (parameter.placement.shard_group, parameter.placement.replicas):
                if group is not None:
                    groups[group] = None
    return list(groups)

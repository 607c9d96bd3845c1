"""Runs over played streams that tests of offload to several places share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.offload.offloaded_state import OffloadedState
from shardwise.sharded.extensions.offloaded import slice_of
from tests.engine.rig import Net, Twins
from tests.engine.streams import played
from tests.offload.rig import Adapted, amsgrad, momentum, plain_adam
from tests.optim.rig import Tied, same_states

_PROGRAMS = pytest.mark.parametrize(
    ("build", "optimizer"), [(Net, momentum), (Tied, plain_adam), (Adapted, amsgrad)], ids=["net", "tied", "frozen"]
)
_STRATEGIES = pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer"])


def every_program(test: Callable[..., None]) -> Callable[..., None]:
    """Give a test the arguments of `same_bits_in_order`, but for the place."""
    return _PROGRAMS(_STRATEGIES(test))  # type: ignore[no-any-return]


def same_bits_in_order(
    strategy: str,
    build: Callable[[], nn.Module],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    offload: sw.Offload,
) -> None:
    """Three steps are those of the plain model; what is said to lie elsewhere does, and nothing else."""
    with played() as order:
        twins = Twins(build, optimizer=optimizer, strategy=strategy, offload=offload)
        twins.train(3)
        same_states(twins)
    assert order.races == []
    parameters = [p for p in twins.sharded.parameters() if isinstance(p, ShardedParameter)]
    assert all((slice_of(p) is not None) == (offload.params is not None) for p in parameters)
    kept = {type(v) for s in twins.optimizers[1].state.values() for v in s.values() if isinstance(v, ShardedParameter)}
    assert kept == {OffloadedState if offload.optimizer is not None else ShardedParameter}


def steps_in_backward(offload: sw.Offload) -> None:
    with played() as order:
        twins = Twins(offload=offload)
        sw.optimizer_in_backward(twins.sharded, twins.optimizers[1])
        for _ in range(3):
            twins.backward()
            twins.step()
            twins.same_parameters()
    assert order.races == []


def goes_on_alike(other: Twins, twins: Twins) -> None:
    """What was loaded from a checkpoint of `twins` trains on as its plain model does."""
    other.plain.load_state_dict(twins.plain.state_dict())
    other.optimizers[0].load_state_dict(copy.deepcopy(twins.optimizers[0].state_dict()))
    other.steps = twins.steps
    other.train(2)
    same_states(other)


def to_the_device_and_back(twins: Twins, offload: sw.Offload, path: str) -> None:
    """Through checkpoints, to a model without offload and to another with it, which both train on alike."""
    sw.checkpoint.save(f"{path}/one", twins.sharded, twins.optimizers[1])
    on_device = Twins()
    sw.checkpoint.load(f"{path}/one", on_device.sharded, on_device.optimizers[1])
    again = Twins(offload=offload)
    sw.checkpoint.save(f"{path}/two", on_device.sharded, on_device.optimizers[1])
    sw.checkpoint.load(f"{path}/two", again.sharded, again.optimizers[1])
    for other in (on_device, again):
        goes_on_alike(other, twins)

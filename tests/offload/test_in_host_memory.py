"""Shards and optimizer state in the host's memory while a device computes: the same bits, nothing unordered, and on the
device no more than the rings. Played on CPU ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.extensions.offloaded import shard_stores
from shardwise.engine.lookup import require_engine
from shardwise.errors import UsageError
from shardwise.offload.shard_store import BUFFERS
from shardwise.offload.stores import of_owner
from shardwise.offload.tiers.device_buffers import DeviceBuffers
from shardwise.offload.tiers.host_memory import HostMemory
from tests.engine.rig import Net, Twins, batch, on_ranks, same_tensors, seeded, squares
from tests.engine.streams import Order, played
from tests.offload.played_runs import every_program, same_bits_in_order, steps_in_backward, to_the_device_and_back
from tests.offload.rig import PLACES, edited_steps, shared_folder


@pytest.mark.parametrize("place", PLACES)
@every_program
@on_ranks(2)
def test_the_same_bits_in_order(
    strategy: str, build: Callable[[], nn.Module], optimizer: Callable[[Any], torch.optim.Optimizer], place: str
) -> None:
    same_bits_in_order(strategy, build, optimizer, sw.Offload(pin=False, **PLACES[place]))


def train(offload: sw.Offload | None) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Accumulation, clipping, evaluation, edits of weights and full weights; steps are prefetched by the first one."""
    with played() as order:
        model = sw.shard(seeded(lambda: Net(6)), "full_shard", offload=offload)
        losses = edited_steps(model, torch.no_grad)
        full = sw.full_state_dict(model, rank0_only=False)
    return losses, full, order.races


@on_ranks(2)
def test_accumulation_clipping_evaluation_and_edits() -> None:
    losses, full, races = train(None)
    assert races == []
    for place in PLACES.values():
        offloaded = train(sw.Offload(pin=False, **place))
        assert offloaded[0] == losses
        assert offloaded[2] == []
        same_tensors(full, offloaded[1])


@pytest.mark.parametrize("place", PLACES)
@on_ranks(2)
def test_steps_in_backward(place: str) -> None:
    steps_in_backward(sw.Offload(pin=False, **PLACES[place]))


@on_ranks(2)
def test_checkpoints_go_to_the_device_and_back() -> None:
    path = shared_folder()
    offload = sw.Offload(pin=False, **PLACES["both"])
    with played() as order:
        twins = Twins(offload=offload)
        twins.train(2)
        with pytest.raises(UsageError, match="offloaded"):
            sw.checkpoint.save(f"{path}/late", twins.sharded, twins.optimizers[1], asynchronous=True)
        to_the_device_and_back(twins, offload, path)
    assert order.races == []


@on_ranks(1)
def test_the_device_has_rings_and_slots_alone() -> None:
    with played():
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(24)])
        offload = sw.Offload(params="cpu", optimizer="cpu", pin=False, ring_bytes=2**21)
        sw.shard(model, units={nn.Linear}, offload=offload)
        optimizer = torch.optim.AdamW(model.parameters())
        sw.optimizer_in_backward(model, optimizer)
        for _ in range(3):
            model(torch.ones(2, 256)).sum().backward()
    (shards,) = shard_stores(require_engine(model))
    states = of_owner(require_engine(model).root).states
    assert states is not None
    nbytes = 24 * 256 * 256 * 4
    assert isinstance(shards.tier, HostMemory)
    assert (shards.tier.nbytes, states.tier.nbytes) == (nbytes, 2 * nbytes)
    now = sw.memory(model).now
    assert 0 < now["param_shards"] == shards.ring_bytes <= BUFFERS * nbytes // 24
    assert now["optimizer"] == 2**21 + 24 * 4  # and the counts of steps
    assert now["grad_shards"] == 0
    assert sw.memory(model).host == {"param_shards": nbytes, "optimizer": 2 * nbytes}
    assert sw.memory(model).disk == {}


@on_ranks(1)
def test_an_order_that_is_missing_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    offload = sw.Offload(pin=False, **PLACES["both"])

    def races() -> Order:
        with played() as order:
            Twins(offload=offload).train(3)
        return order

    assert races().races == []
    for method in ("use", "before"):
        with monkeypatch.context() as patch:
            patch.setattr(DeviceBuffers, method, lambda *_: [])
            assert races().races != []


@on_ranks(2)
def test_weights_that_are_only_read_do_not_go_back() -> None:
    """By forwards, norms, averages, copies and saves."""
    path = shared_folder()
    with played() as order:
        model = sw.shard(seeded(lambda: Net(6)), offload=sw.Offload(params="cpu", pin=False))
        averages = [parameter.detach().clone() for parameter in model.parameters()]
        (store,) = shard_stores(require_engine(model))
        store.finish()
        with mock.patch.object(HostMemory, "write", side_effect=AssertionError("a slice went back")):
            squares(model, batch(0)).backward()  # type: ignore[no-untyped-call]
            torch._foreach_lerp_(averages, list(model.parameters()), 0.1)
            for average, parameter in zip(averages, model.parameters(), strict=True):
                average.lerp_(parameter.detach(), 0.1)
                parameter.norm()
                copy.deepcopy(parameter.detach())
            sw.full_state_dict(model)
            sw.checkpoint.save(f"{path}/one", model)
            store.finish()
    assert order.races == []

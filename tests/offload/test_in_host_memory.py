"""Shards and optimizer state in the host's memory while a device computes: the same bits, nothing unordered, and on the
device no more than the rings. Played on CPU ranks."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine.extensions.offloaded import shard_stores
from shardwise.engine.lookup import require_engine
from shardwise.offload.shard_store import BUFFERS
from shardwise.offload.stores import of_owner
from shardwise.offload.tiers.device_buffers import DeviceBuffers
from shardwise.offload.tiers.host_memory import HostMemory
from tests.engine.rig import Net, Twins, batch, on_ranks, seeded, squares
from tests.engine.streams import Order, played
from tests.offload.rig import LEAST, shared_folder


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
    offload = sw.Offload(params="cpu", optimizer="cpu", pin=False, ring_bytes=LEAST)

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

"""Bytes on device, host and disk: every one is somewhere, and rings are the engine's."""

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.extensions.offloaded import gradient_stores
from shardwise.engine.lookup import require_engine
from shardwise.fsdp.strategy import Precision
from shardwise.offload import host_step, portions
from shardwise.offload.step import stores_of
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import Allocate, Free, StepPhase
from shardwise.plan.dry_run.step import record
from shardwise.plan.offload import memory
from shardwise.plan.offload.memory import Offloaded, offloaded
from shardwise.policy.places import Places
from tests.engine.rig import on_ranks
from tests.engine.streams import played

BF16 = Precision("bf16", "fp32", "fp32")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = input_ids.float()
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def moved(offload: str | Places | None, **job: Any) -> Offloaded:
    recording = record(Net, Job(seq_len=64, units=1000, offload=offload, **{"precision": BF16, **job}))  # type: ignore[arg-type]
    return offloaded(recording, recording.events)


def setup(found: Offloaded) -> Counter[str]:
    kinds: Counter[str] = Counter()
    for event in found.events:
        if isinstance(event, Allocate) and event.phase is StepPhase.SETUP:
            kinds[event.kind] += event.nbytes
    return kinds


@pytest.mark.parametrize(
    ("words", "gpu", "leave"),
    [
        ("optimizer=cpu", "h100-sxm-80gb", {"optimizer"}),
        ("params=cpu", "h100-sxm-80gb", {"param_shards"}),
        ("cpu", "h100-sxm-80gb", {"param_shards", "optimizer"}),
        ("cpu", "cpu", set()),
        ("optimizer=nvme", "cpu", {"optimizer"}),
        ("nvme", "cpu", {"param_shards", "optimizer"}),
        ("params=cpu,optimizer=nvme", "cpu", {"optimizer"}),
        ("optimizer=nvme", "h100-sxm-80gb", {"optimizer"}),
        ("nvme", "h100-sxm-80gb", {"param_shards", "optimizer"}),
        ("params=cpu,optimizer=nvme", "h100-sxm-80gb", {"param_shards", "optimizer"}),
        ("gradients=cpu", "h100-sxm-80gb", {"grad_shards"}),
        ("gradients=cpu", "cpu", set()),
        ("params=cpu,optimizer=nvme,gradients=cpu", "h100-sxm-80gb", {"param_shards", "optimizer", "grad_shards"}),
    ],
)
def test_what_leaves_the_device_is_elsewhere(words: str, gpu: str, leave: set[str]) -> None:
    usual = moved(None, gpus_per_node=2, gpu=gpu)
    found = moved(words, gpus_per_node=2, gpu=gpu)
    kinds, before = setup(found), setup(usual)
    for kind in before.keys() - leave:
        assert kinds[kind] == before[kind]
    slices = 4 * 4096 * -(-(64 * 64 + 64) * 4 // 2 // 4096)
    rings = {"optimizer": 64 * 2**20, "param_shards": slices, "grad_shards": slices}  # as `sw.memory` counts them
    assert {kind: kinds[kind] for kind in leave} == {kind: rings[kind] for kind in leave}
    places = Places.of(words)
    assert places is not None
    on_disk = {
        kind
        for kind, name in (("optimizer", "optimizer"), ("param_shards", "params"))
        if getattr(places, name) == "nvme"
    }
    stages = 0 if gpu == "cpu" else sum(rings[kind] for kind in on_disk)
    assert found.disk_bytes == found.stepped_disk_bytes == sum(before[kind] for kind in on_disk)
    assert found.host_bytes == sum(before[kind] for kind in leave - on_disk) + stages
    assert found.stepped_bytes == sum(before[kind] for kind in leave - {"grad_shards"})
    assert found.gradient_bytes == (before["grad_shards"] if "grad_shards" in leave else 0)
    known = {event.block for event in found.events if isinstance(event, Allocate)}
    assert all(event.block in known for event in found.events if isinstance(event, Free))


def test_a_shard_group_of_one_has_slots_like_any_other() -> None:
    """Where shard and slot are otherwise one."""
    stored = Precision("fp32", "fp32", "fp32")
    alone = {"gpus_per_node": 1, "strategy": "full_shard", "precision": stored}
    assert setup(moved(None, **alone))["gathered_slots"] == 0
    two = setup(moved(None, gpus_per_node=2, precision=stored))["gathered_slots"]
    assert setup(moved("params=cpu", **alone))["gathered_slots"] == two
    kept = setup(moved("params=cpu", gpus_per_node=1, strategy="no_shard", precision=stored))["gathered_slots"]
    assert kept == 4 * (64 * 64 + 64) * 4


def test_rings_are_the_engines(tmp_path: Path) -> None:
    assert (portions.BUFFERS, portions._LEAST_RING_BYTES) == (memory._RING_BUFFERS, memory._LEAST_RING_BYTES)
    assert (host_step._BUFFERS, host_step._PORTION_BYTES) == (memory._STAGING_BUFFERS, memory._STAGED_BYTES)
    assert portions.PAGE_BYTES == memory._PAGE_BYTES

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 8))

    class Fed(nn.Sequential):
        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids.float()).mean()

    recording = record(lambda: Fed(*build()), Job(gpu="cpu", gpus_per_node=1, seq_len=1024, offload="optimizer=nvme"))  # type: ignore[arg-type]
    found = offloaded(recording, recording.events)
    model = sw.shard(build(), offload=sw.Offload(optimizer="nvme", path=tmp_path))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2, 1024)).sum().backward()
    optimizer.step()
    [store] = stores_of(optimizer)
    ring = next(event.nbytes for event in found.events if isinstance(event, Allocate) and event.kind == "optimizer")
    assert ring == store.ring_bytes > memory._LEAST_RING_BYTES
    assert found.disk_bytes <= store.tier.nbytes <= found.disk_bytes + 4 * 4096
    del model, optimizer, store
    gc.collect()


def test_a_ring_that_is_asked_for_is_the_engines(tmp_path: Path) -> None:
    """Whole buffers of it; and no less than the largest state takes, which training refuses."""
    asked = 40 * 2**20 + 5000

    def ring(nbytes: int) -> int:
        places = Places(optimizer="nvme", ring_bytes=nbytes)
        return setup(moved(places, gpu="cpu", gpus_per_node=1))["optimizer"]

    model = sw.shard(Net(), units=1000, offload=sw.Offload(optimizer="nvme", path=tmp_path, ring_bytes=asked))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2, 64)).backward()
    optimizer.step()
    [store] = stores_of(optimizer)
    assert ring(asked) == store.ring_bytes < asked
    assert sw.memory(model).now["optimizer"] in range(store.ring_bytes, store.ring_bytes + 1000)
    assert ring(1) == 4 * 64 * 64 * 4 * 2
    del model, optimizer, store
    gc.collect()


@pytest.mark.parametrize("layers", [1, 2, 3, 6])
def test_there_are_no_more_buffers_than_slices(layers: int, tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = Net()
        del model.layers[layers:]
        model.layers.extend(nn.Linear(64, 64) for _ in range(layers - len(model.layers)))
        return model

    recording = record(build, Job(gpu="cpu", gpus_per_node=1, seq_len=64, units=1000, offload="params=nvme"))  # type: ignore[arg-type]
    model = sw.shard(build(), "full_shard", units=1000, offload=sw.Offload(params="nvme", path=tmp_path))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 64)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert setup(offloaded(recording, recording.events))["param_shards"] == sw.memory(model).peak["param_shards"]
    del model, optimizer
    gc.collect()


def test_frozen_parameters_lie_in_slices_of_their_own() -> None:
    class Half(Net):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)
            self.layers[0].bias = nn.Parameter(self.layers[0].bias.detach())

    job = Job(gpu="cpu", gpus_per_node=1, seq_len=64, units=10**6, offload="params=nvme")  # type: ignore[arg-type]
    recording = record(Half, job)
    assert len(recording.facts.unit_shard_bytes) == 1
    frozen = 4 * (64 * 64 + 64) * 4 - 64 * 4
    assert setup(offloaded(recording, recording.events))["param_shards"] == 2 * -(-frozen // 4096) * 4096


def test_gradients_that_take_their_steps_in_backward_rest_nowhere() -> None:
    asked = {"gpus_per_node": 2, "gpu": "h100-sxm-80gb", "optimizer_in_backward": True}
    assert moved("gradients=cpu", **asked) == moved(None, **asked)


@on_ranks(1)
def test_the_ring_of_gradients_is_the_engines() -> None:
    """And what they have on the host."""
    found = moved("gradients=cpu", gpu="h100-sxm-80gb", gpus_per_node=1, strategy="full_shard", precision=Precision())
    with played():
        model = sw.shard(Net(), "full_shard", units=1000, offload=sw.Offload(gradients="cpu", pin=False))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 64)).backward()
            sw.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert setup(found)["grad_shards"] == sw.memory(model).now["grad_shards"]
        [store] = gradient_stores(require_engine(model))
        assert found.host_bytes <= store.tier.nbytes <= found.host_bytes + 4 * 4096

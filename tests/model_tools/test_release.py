"""`sw.release`: memory between steps."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.engine.lookup import require_engine
from shardwise.errors import UsageError
from tests.engine.allocations import shared_mapping_bytes
from tests.engine.cases import AT_MOST_TWO_AND_FOUR, Case, collectives
from tests.engine.rig import Net, Twins, batch, on_ranks, recording, seeded, squares
from tests.ranks import RankPools

SLOTS = ("gathered_slots", "reduce_slots", "grad_shards")


def course(case: Case, releases: bool) -> list[Tensor]:
    """Losses and weights of some steps, with zero_grad between."""
    model = case.shard(seeded(Net))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found = []
    for step in range(3):
        loss = squares(model, batch(step))
        if releases and step:
            sw.release(model)  # saved tensors are handles: they find the unit wherever it is
            assert not require_engine(model).unsharder.all_slots
            assert not require_engine(model).reducer.slots.all
        loss.backward()  # type: ignore[no-untyped-call]
        if releases:
            sw.release(model)
        optimizer.step()
        optimizer.zero_grad()
        if releases:
            sw.release(model)
        found.append(loss.detach())
    return [*found, *(p.full_tensor() for p in model.parameters())]  # type: ignore[operator]


def trains_on(case: Case) -> None:
    for expected, actual in zip(course(case, False), course(case, True), strict=True):
        assert torch.equal(expected, actual)


@pytest.mark.parametrize("case", AT_MOST_TWO_AND_FOUR, ids=str)
def test_training_goes_on_bit_by_bit(ranks: RankPools, case: Case) -> None:
    ranks(case.world_size).run(trains_on, case, timeout_s=60)


def leaves_nothing(kind: str) -> None:
    with collectives(kind):
        model = sw.shard(seeded(Net))
    before = shared_mapping_bytes()
    squares(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    slots = [*require_engine(model).unsharder.all_slots, *require_engine(model).reducer.slots.all]
    memory = [weakref.ref(slot.buffer.bytes) for slot in slots]
    held = sum(slot.buffer.bytes.numel() for slot in slots)
    assert held
    del slots
    if kind == "shm":
        assert sum(shared_mapping_bytes().values()) - sum(before.values()) >= held
    sw.release(model)
    gc.collect()
    assert [reference() for reference in memory if reference() is not None] == []
    assert shared_mapping_bytes() == before
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    del gradients
    model.zero_grad()
    sw.release(model)
    with torch.no_grad():
        model(batch(0))
    known = sw.memory(model).now
    assert all(known[kind] > 0 for kind in SLOTS)


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_nothing_is_left_of_slots_and_gradients_stay(ranks: RankPools, kind: str) -> None:
    ranks(2).run(leaves_nothing, kind)


@on_ranks(2)
def test_every_rank_drops_every_buffer_once() -> None:
    with recording():
        twins = Twins()
    twins.train(steps=1)
    sw.release(twins.sharded)
    twins.train(steps=1)
    sw.release(twins.sharded)
    events = twins.engine.mesh.shard.events  # type: ignore[attr-defined]
    made, dropped = ([event.buffer for event in events if event.op == op] for op in ("allocate", "drop"))
    assert sorted(made) == sorted(dropped)


@on_ranks(2)
def test_not_inside_anything_and_not_over_what_waits() -> None:
    model = sw.shard(seeded(Net))
    with sw.unsharded(model), pytest.raises(UsageError, match=r"sw\.release inside"):
        sw.release(model)
    with sw.no_sync(model):
        squares(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(UsageError, match=r"from a backward inside sw\.no_sync wait to be reduced"):
        sw.release(model)
    model.zero_grad()
    sw.release(model)
    with pytest.raises(UsageError, match="not sharded"):
        sw.release(torch.nn.Linear(2, 2))

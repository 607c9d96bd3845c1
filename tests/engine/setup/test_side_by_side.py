"""Blocks that are sharded one by one, without a root."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.compat import fsdp2
from shardwise.engine.lookup import engine_of
from shardwise.errors import UsageError
from tests.engine.rig import Block, Net, batch, count, on_ranks, recording, same_tensors, seeded, squares


def blocks_alone(depth: int = 6) -> Any:
    model = seeded(lambda: Net(depth))
    for block in model.blocks:  # type: ignore[union-attr]
        fsdp2.fully_shard(block)
    return model


def train(model: Any, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        loss = squares(model, torch.ones(5, 4))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(2)
def test_they_share_one_arena_and_one_order() -> None:
    plain = seeded(lambda: Net(6))
    expected = train(plain)
    with recording():
        model = blocks_alone()
    fsdp2.share_comm_ctx(list(model.blocks))
    engine = engine_of(model)
    assert engine is not None
    assert all(engine_of(block) is engine for block in model.blocks)
    assert train(model) == expected
    assert len(engine.unsharder.all_slots) == 3, "for six blocks"
    assert len(engine.reducer.slots.all) == 2
    assert engine.schedule.divergences == 0
    gathers = count(engine, "all_gather")
    squares(model, batch(0))
    assert count(engine, "all_gather") - gathers == 7, "and one ahead, for backward"
    same_tensors(dict(plain.named_parameters()), dict(model.named_parameters()))


@on_ranks(2)
def test_a_root_takes_them_over_together() -> None:
    model = blocks_alone()
    sw.shard(list(model.blocks))
    expected = train(seeded(lambda: Net(6)), 1)
    assert train(model, 1) == expected
    sw.shard(model)
    assert {unit.fqn for unit in sw.describe(model).units} == {"", *(f"blocks.{index}" for index in range(6))}
    train(model, 1)
    assert len([module for module in model.modules() if isinstance(module, Block)]) == 6


@on_ranks(2)
def test_some_that_are_sharded_and_some_that_are_not_are_refused() -> None:
    model = blocks_alone(2)
    with pytest.raises(UsageError, match="sharded already"):
        sw.shard([*model.blocks, nn.Linear(2, 2)])

"""Strategies differ in memory and communication, not in results: losses are equal to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.engine.cases import collectives
from tests.engine.rig import Net, Twins, batch, count, on_ranks, recording, seeded, squares

if TYPE_CHECKING:
    from tests.ranks import RankPools

ONE_SHARD_GROUP = ("shard_optimizer", "shard_grad_op", "full_shard")
WAYS: dict[str, dict[str, Any]] = {
    "no_shard": {"strategy": "no_shard"},
    "shard_optimizer": {"strategy": "shard_optimizer"},
    "shard_grad_op": {"strategy": "shard_grad_op"},
    "full_shard": {"strategy": "full_shard"},
    "full_shard, kept": {"strategy": "full_shard", "reshard_after_forward": False},
    "shard_grad_op, resharded": {"strategy": "shard_grad_op", "reshard_after_forward": True},
    "full_shard, small units": {"strategy": "full_shard", "units": {nn.Linear}, "slots": 2},
    "full_shard, one unit": {"strategy": "full_shard", "units": lambda fqn, module: False},
}


def _losses(name: str, way: str, clip: bool, steps: int = 4) -> list[Tensor]:
    with collectives(name):
        model = sw.shard(seeded(Net), **WAYS[way])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        loss = squares(model, batch(step))
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _every_way(ways: list[str], clip: bool) -> dict[str, Tensor]:
    return {f"{way} over {name}": torch.stack(_losses(name, way, clip)) for name in ("shm", "gloo") for way in ways}


@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_are_bit_identical(ranks: RankPools, world_size: int) -> None:
    """Over strategies, re-sharding, units and collectives."""
    for by_way in ranks(world_size).run(_every_way, list(WAYS), False):
        first = by_way.pop("full_shard over shm")
        assert [way for way, losses in by_way.items() if not torch.equal(losses, first)] == []


@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_with_clipping_are_bit_identical(ranks: RankPools, world_size: int) -> None:
    """Where slices are the same; the partial sums of a norm follow them."""
    for by_way in ranks(world_size).run(_every_way, list(ONE_SHARD_GROUP), True):
        first = by_way.pop("full_shard over shm")
        assert [way for way, losses in by_way.items() if not torch.equal(losses, first)] == []


@pytest.mark.parametrize("name", ["shm", "gloo", "torch"])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_as_one_process_over_the_batches_in_rank_order(way: str, name: str) -> None:
    with collectives(name):
        twins = Twins(**WAYS[way])
    twins.train(3)


@pytest.mark.parametrize("strategy", ["shard_optimizer", "shard_grad_op"])
@on_ranks(2)
def test_kept_parameters_are_gathered_afresh_after_a_step(strategy: str) -> None:
    """And only then: accumulation and evaluation reuse what is gathered."""
    with recording():
        twins = Twins(strategy=strategy)
    units = len(twins.engine.units)
    twins.train(1)
    for _ in range(3):
        gathers = count(twins.engine, "all_gather")
        twins.backward()
        assert count(twins.engine, "all_gather") == gathers + units
        twins.backward()
        with torch.no_grad():
            assert torch.equal(twins.sharded(batch(9)), twins.plain(batch(9)))
        assert count(twins.engine, "all_gather") == gathers + units
        twins.step()
    twins.same_parameters()


@pytest.mark.parametrize("strategy", ["no_shard", *ONE_SHARD_GROUP])
@on_ranks(2)
def test_accumulation_with_communication(strategy: str) -> None:
    """Every micro-batch reduced: gradients add up as they do in one process."""
    twins = Twins(strategy=strategy)
    for _ in range(2):
        for _ in range(3):
            twins.backward()
            twins.same_gradients()
        twins.step()
        twins.same_parameters()

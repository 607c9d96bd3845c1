"""Strategies by name, and what each says to the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.fsdp.strategy import Strategy
from shardwise.policy.strategies import OTHER_NAMES, strategy_of

NAMES = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard", "hybrid_shard", "hybrid_shard_zero2")


def test_every_promised_name_parses() -> None:
    assert [strategy.value for strategy in Strategy] == list(NAMES)
    for name in NAMES:
        strategy = strategy_of(name)
        assert strategy is strategy_of(strategy) is getattr(sw.Strategy, name.upper())


def test_the_fields_names_are_taken() -> None:
    theirs = {name: strategy_of(name).value for name in ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp")}
    assert theirs == dict(zip(theirs, (*NAMES[:4], "full_shard", "hybrid_shard"), strict=True)) == OTHER_NAMES
    model = sw.shard(torch.nn.Linear(2, 2), "zero3")
    assert "full_shard" in str(sw.describe(model))


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ("full_shad", "full_shard"),
        ("FULL_SHARD", "full_shard"),
        ("hybrid", "hybrid_shard"),
        ("shard_grad", "shard_grad_op"),
        ("ZeRO-3", "zero3"),
    ],
)
def test_a_wrong_name_is_told_the_nearest(asked: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown strategy '{asked}'; did you mean '{nearest}'"):
        strategy_of(asked)


@pytest.mark.parametrize("asked", ["zero", 3, None, True, ["full_shard"]])
def test_anything_else_is_told_the_names(asked: Any) -> None:
    with pytest.raises(
        ConfigError, match="must be one of no_shard, shard_optimizer, shard_grad_op, full_shard, hybrid_shard"
    ):
        strategy_of(asked)


@pytest.mark.parametrize(
    ("name", "sharded", "replicated", "reshards_after_forward", "has_full_gradients"),
    [
        ("no_shard", False, True, False, False),
        ("shard_optimizer", True, False, False, True),
        ("shard_grad_op", True, False, False, False),
        ("full_shard", True, False, True, False),
        ("hybrid_shard", True, True, True, False),
        ("hybrid_shard_zero2", True, True, False, False),
    ],
)
def test_traits(
    name: str, sharded: bool, replicated: bool, reshards_after_forward: bool, has_full_gradients: bool
) -> None:
    strategy = strategy_of(name)
    traits = strategy.sharded, strategy.replicated, strategy.reshards_after_forward, strategy.has_full_gradients
    assert traits == (sharded, replicated, reshards_after_forward, has_full_gradients)

"""Sharded training gives the numbers of unsharded training, whatever the model is."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest

from tests.parity.architectures import ARCHITECTURES
from tests.parity.comparison import LOSS_TOLERANCE, mismatches, untold
from tests.parity.training import Outcome, reference, sharded

if TYPE_CHECKING:
    from tests.ranks import RankPools


@functools.cache
def expected(name: str, world_size: int) -> Outcome:
    return reference(ARCHITECTURES[name], world_size)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_full_shard_matches(ranks: RankPools, name: str, world_size: int) -> None:
    outcome = ranks(world_size).run(sharded, name, {"strategy": "full_shard"})[0]
    assert mismatches(outcome, expected(name, world_size)) == []
    assert untold(expected(name, world_size)) == []


@pytest.mark.parametrize("name", [name for name, a in ARCHITECTURES.items() if a.separable])
def test_mean_over_ranks_is_the_whole_batch(name: str) -> None:
    """The reference's parts are a fair stand-in for the global batch: before the first update the losses agree."""
    whole, parts = reference(ARCHITECTURES[name], 1), expected(name, 2)
    assert parts.losses[0] == pytest.approx(whole.losses[0], rel=LOSS_TOLERANCE)
    assert parts.norms[0] == pytest.approx(whole.norms[0], rel=10 * LOSS_TOLERANCE)


VARIANTS: dict[str, tuple[int, dict[str, Any], tuple[int, ...]]] = {
    "grad-op": (2, {"strategy": "shard_grad_op"}, ()),
    "optimizer": (3, {"strategy": "shard_optimizer"}, ()),
    "no-shard": (2, {"strategy": "no_shard"}, ()),
    "hybrid": (4, {"strategy": "hybrid_shard"}, (2, 2)),
    "hybrid-zero2": (4, {"strategy": "hybrid_shard_zero2"}, (2, 2)),
    "two-slots": (2, {"slots": 2}, ()),
    "smaller-group": (4, {"reshard_after_forward": 2}, ()),
    "many-units": (2, {"units": 500, "slots": 8}, ()),
    "one-unit": (3, {"units": 10**9}, ()),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["llama", "t5", "mixtral", "clip"])
def test_variant_matches(ranks: RankPools, name: str, variant: str) -> None:
    world_size, options, axes = VARIANTS[variant]
    outcome = ranks(world_size).run(sharded, name, options, False, axes)[0]
    assert mismatches(outcome, expected(name, world_size)) == []

"""Models built on the meta device: the numbers of the seeded build, at any world size, one unit's at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.lookup import require_engine
from shardwise.errors import LayoutError
from tests.engine.allocations import Live, traced
from tests.engine.rig import Block, Net, seeded

if TYPE_CHECKING:
    from tests.ranks import RankPools


class Mixed(nn.Module):
    """Several initialisations, a tied weight and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.mix = nn.MultiheadAttention(6, 2)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight


def _built_on_meta() -> dict[str, Tensor]:
    torch.manual_seed(7)
    with torch.device("meta"):
        model = Mixed()
    sw.shard(model)
    assert model.head.weight is model.embed.weight
    return {**sw.full_state_dict(model, rank0_only=False), "random": torch.rand(3)}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_same_numbers_on_every_rank_at_any_world_size(ranks: RankPools) -> None:
    (alone,) = ranks(1).run(_built_on_meta)
    for world_size in (2, 3):
        for model in ranks(world_size).run(_built_on_meta):
            assert same(
                {k: v for k, v in model.items() if k != "random"}, {k: v for k, v in alone.items() if k != "random"}
            )


def _plain_modules(meta: bool) -> dict[str, Tensor]:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(5, 7), nn.LayerNorm(7), nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 3)), nn.Embedding(4, 3)
        )

    torch.manual_seed(7)
    if not meta:
        return build().state_dict()
    with torch.device("meta"):
        model = build()
    sw.shard(model, units={nn.Linear})
    return sw.full_state_dict(model, rank0_only=False)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_plain_modules_have_the_numbers_of_the_seeded_build(ranks: RankPools, world_size: int) -> None:
    expected = _plain_modules(meta=False)
    for model in ranks(world_size).run(_plain_modules, True):
        assert same(model, expected)


class Bare(nn.Module):
    """Nothing says how to initialise it again."""

    def __init__(self, parameter: bool) -> None:
        super().__init__()
        self.net = Net(1)
        if parameter:
            self.scale = nn.Parameter(torch.ones(3))
        else:
            self.register_buffer("table", torch.arange(4.0))


@pytest.mark.parametrize(("parameter", "name"), [(True, "scale"), (False, "table")])
def test_what_nothing_initialises_is_an_error_that_names_it(parameter: bool, name: str) -> None:
    with torch.device("meta"):
        model = Bare(parameter)
    with pytest.raises(LayoutError, match=name):
        sw.shard(model)


LAYERS, WIDTH = 6, 64


def _peak_bytes() -> tuple[int, int, int, int]:
    with torch.device("meta"):
        model = seeded(lambda: Net(LAYERS, lambda: Block(WIDTH)))
        model.enter, model.leave = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
    with traced() as allocations:
        sw.shard(model)
    units = require_engine(model).units
    unit_bytes = [sum(4 * entry.numel for g in unit.groups for entry in g.layout.entries) for unit in units]
    live = Live(allocations)
    return live.peak_bytes, live.now_bytes, max(unit_bytes[1:]), unit_bytes[0]


def test_full_weights_of_one_unit_exist_at_a_time(ranks: RankPools) -> None:
    """And the root's: counted by the allocator, beside the shards that stay."""
    for peak, stays, unit, root in ranks(2).run(_peak_bytes):
        slack = unit // 2  # the largest parameter once more, while it is drawn; random states
        assert peak - stays <= unit + root + slack
        assert stays < (LAYERS * unit + root) // 2 + unit // 4 + 65536

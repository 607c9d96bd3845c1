"""The table of units: every number in it against the tensors that the ranks really hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.engine.cases import Case
from tests.engine.rig import Net, seeded

if TYPE_CHECKING:
    from tests.ranks import RankPools


class Experts(nn.Module):
    """A unit with many parameters alike, a frozen and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 7) for _ in range(6))
        self.router = nn.Parameter(torch.ones(6), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x


def model(depth: int) -> nn.Module:
    built = seeded(lambda: Net(depth))
    built.mixture = Experts()
    return built


def _described(case: Case, depth: int) -> tuple[str, list[Any], dict[str, Any]]:
    sharded = case.shard(model(depth), units={type(seeded(Net).blocks[0]), Experts})  # type: ignore[index, union-attr]
    description = sw.describe(sharded)
    held = {
        p.fqn: (tuple(p.shape), p.placement.shard_group.rank, p.fragment.start, p.fragment.stop, p.local.nbytes)
        for p in sharded.parameters()
    }
    units = [
        (u.fqn, u.module, u.numel, u.shard_bytes, [(p.fqn, p.shape, p.dtypes, p.holders) for p in u.parameters])
        for u in description.units
    ]
    return str(description), units, held


@pytest.mark.parametrize("case", [Case("full_shard", 3), Case("hybrid_shard", 4), Case("no_shard", 2)], ids=str)
def test_it_says_who_holds_what(ranks: RankPools, case: Case) -> None:
    outcomes = ranks(case.world_size).run(_described, case, 2)
    texts = {text for text, _, _ in outcomes}
    assert len(texts) == 1  # every rank says the same
    for _, units, held in outcomes:
        assert [unit[0] for unit in units] == ["", "blocks.0", "blocks.1", "mixture"]
        said = {fqn: (shape, holders) for unit in units for fqn, shape, _, holders in unit[4]}
        assert said.keys() == held.keys()
        for fqn, (shape, rank, start, stop, _) in held.items():
            assert said[fqn][0] == shape
            mine = [(a, b) for r, a, b in said[fqn][1] if r == rank]
            assert mine == ([(start, stop)] if stop > start else []), fqn
        for _, _, numel, shard_bytes, parameters in units:
            assert numel == sum(torch.Size(shape).numel() for _, shape, _, _ in parameters)
            assert shard_bytes >= sum(held[fqn][4] for fqn, *_ in parameters)
            for _, shape, _, holders in parameters:
                assert sum(stop - start for _, start, stop in holders) == torch.Size(shape).numel()


def test_what_it_looks_like(ranks: RankPools) -> None:
    text = ranks(3).run(_described, Case("full_shard", 3), 5)[0][0]
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0].startswith("Net: ")
    assert "full_shard, 3-way shards, slots=3" in lines[0]
    assert any(line.startswith("blocks.0…4 (each of 5)") for line in lines)
    assert any(line.startswith("all ") for line in lines)
    held = lines[lines.index("who holds what: ranks 0-2 of the shard group") :]
    assert "unit blocks.0…4 (each of 5)" in held
    mixture = held[held.index("unit mixture") :]
    assert any(line.startswith("experts.0…5.weight  6 times 7 x 5  fp32") for line in mixture)
    assert any(line.startswith("router") and "fp32 frozen" in line for line in mixture)
    assert any(line.startswith("nothing") and line.endswith("no elements") for line in mixture)
    assert all(not line.endswith(" ") for line in text.splitlines())


def test_a_big_model_fits_on_a_screen() -> None:
    """However many blocks and ranks: a line for what is alike."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=3, world_size=1024, store=FakeStore())
    try:
        with torch.device("meta"):
            built = Net(200)
        description = sw.describe(sw.shard(built))
    finally:
        torch.distributed.destroy_process_group()
    assert len(description.units) == 201
    assert len(description.splitlines()) < 30
    assert max(map(len, description.splitlines())) <= 120


def test_one_rank_holds_all() -> None:
    assert sw.describe(sw.shard(Net())).endswith("every rank holds all")

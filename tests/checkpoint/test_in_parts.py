"""A model around several modules, each of which was sharded by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.checkpoint.format import optimizer_state
from shardwise.checkpoint.format.local_tensor import piece_of
from shardwise.checkpoint.staging import StagingBuffer
from shardwise.errors import CheckpointError, UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter
from tests.checkpoint.states import everything, same, step
from tests.engine.cases import Case
from tests.engine.rig import Net, adamw, on_ranks
from tests.offload.rig import shared_folder
from tests.ranks import RankPools


class Pair(nn.Module):
    """Two nets with equal names inside, and a layer that belongs to neither."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Net(depth=1), Net(depth=2)
        self.beside = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) * self.two(x) + self.beside(self.one(x))  # type: ignore[no-any-return]


def nets(model: nn.Module) -> None:
    sw.shard(model.one)
    sw.shard(model.two)


def blocks(model: nn.Module) -> None:
    """What is outside of them is not sharded."""
    for block in (*model.one.blocks, *model.two.blocks):
        sw.shard(block)


def blocks_together(model: nn.Module) -> None:
    sw.shard([*model.one.blocks, *model.two.blocks])


WAYS = [nets, blocks, blocks_together, sw.shard]
Way = Callable[[nn.Module], object]


def build(way: Way, seed: int = 7) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Pair()
    way(model)
    return model, adamw(model.parameters())


def take(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step on the same batch on every rank, so that what is not sharded stays the same."""
    model(torch.full((2, 4), 0.3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(path: Path, way: Way = nets, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = build(way)
    for _ in range(2):
        take(model, optimizer)
    sw.checkpoint.save(path, model, optimizer, **options)
    return model, optimizer


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@on_ranks(2)
def test_training_goes_on_however_parts_were_sharded(tmp_path: Path, way: Way) -> None:
    model, optimizer = saved(tmp_path / "c", way)
    sw.checkpoint.verify(tmp_path / "c")
    expected = everything(model, optimizer)
    for other_way in WAYS:
        other, fresh = build(other_way, seed=50)
        sw.checkpoint.load(tmp_path / "c", other, fresh)
        same(everything(other, fresh), expected)
    take(model, optimizer)
    take(other, fresh)
    same(everything(other, fresh), everything(model, optimizer))


@on_ranks(2)
def test_state_of_one_part_is_not_taken_for_the_others(tmp_path: Path) -> None:
    model, _ = build(nets)
    own = adamw(model.one.parameters())
    model.one(torch.ones(2, 4)).sum().backward()
    own.step()
    sw.checkpoint.save(tmp_path / "c", model, own)
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint: optimizer state of two\.enter\.weight"):
        sw.checkpoint.load(tmp_path / "c", model, adamw(model.two.parameters()))


def earlier_names(model: nn.Module) -> dict[int, str]:
    return {id(p): p.fqn if isinstance(p, ShardedParameter) else name for name, p in model.named_parameters()}


@on_ranks(2)
def test_state_that_an_earlier_version_named_is_read_where_that_is_clear(tmp_path: Path) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = sw.shard(Net())
            self.head = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.net(x))  # type: ignore[no-any-return]

    model, (both, _) = Around(), build(nets)
    optimizer, one = adamw(model.parameters()), adamw(both.one.parameters())
    step(model, optimizer, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_state, "fqns_of", earlier_names)
        sw.checkpoint.save(tmp_path / "clear", model, optimizer)
        sw.checkpoint.save(tmp_path / "unclear", both, one)
    other = Around()
    fresh = adamw(other.parameters())
    sw.checkpoint.load(tmp_path / "clear", other, fresh)
    same(everything(other, fresh), everything(model, optimizer))
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint: optimizer state of one\.enter\.weight"):
        sw.checkpoint.load(tmp_path / "unclear", both, one)


@on_ranks(2)
def test_a_parameter_that_an_optimizer_has_twice_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = build(nets)
    optimizer.param_groups[0]["params"].append(model.two.leave.weight)
    with pytest.raises(UsageError, match=r"has the parameter 'two\.leave\.weight' twice"):
        sw.checkpoint.save(tmp_path / "c", model, optimizer)
    assert list(tmp_path.iterdir()) == []


# All engines, not the first one ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["params", "optimizer"])
@on_ranks(2)
def test_what_rests_elsewhere_in_any_part_is_not_saved_asynchronously(tmp_path: Path, place: str) -> None:
    model = Pair()
    sw.shard(model.one)
    sw.shard(model.two, offload=sw.Offload(path=shared_folder(), **{place: "nvme"}))
    optimizer = adamw(model.parameters())
    take(model, optimizer)
    with pytest.raises(UsageError, match="asynchronous=True with parameters or optimizer state offloaded"):
        sw.checkpoint.save(tmp_path / "c", model, optimizer, asynchronous=True)
    weight = model.two.leave.weight
    resting = weight if place == "params" else optimizer.state[weight]["exp_avg"]
    with pytest.raises(UsageError, match="'resting' is offloaded and cannot be copied"):
        StagingBuffer().copy([piece_of(("resting",), resting)])
    sw.checkpoint.save(tmp_path / "c", model, optimizer)
    other, fresh = build(nets, seed=50)
    sw.checkpoint.load(tmp_path / "c", other, fresh)
    same(everything(other, fresh), everything(model, optimizer))


@on_ranks(2)
def test_inside_an_unsharded_part_nothing_is_saved_or_loaded(tmp_path: Path) -> None:
    model, optimizer = saved(tmp_path / "c")
    for part in (model.one, model.two):
        with sw.unsharded(part):
            for call in (sw.checkpoint.load, sw.checkpoint.load_pretrained):
                with pytest.raises(UsageError, match=r"inside a forward, a backward or sw\.unsharded"):
                    call(tmp_path / "c", model)
            with pytest.raises(UsageError, match=r"inside a forward, a backward or sw\.unsharded"):
                sw.checkpoint.save(tmp_path / "d", model, optimizer)


@on_ranks(2)
def test_a_part_that_is_held_unsharded_is_saved_and_gets_what_is_loaded(tmp_path: Path) -> None:
    model, optimizer = build(nets)
    x = torch.ones(2, 4)
    sw.unshard(model.two)
    sw.checkpoint.save(tmp_path / "c", model, optimizer)
    with torch.no_grad():
        expected = model(x)
        for load in (sw.checkpoint.load, sw.checkpoint.load_pretrained):
            other, _ = build(nets, seed=50)
            sw.unshard(other.two)
            load(tmp_path / "c", other)
            assert torch.equal(other(x), expected)


@pytest.mark.parametrize(
    "strategies",
    [("full_shard", "no_shard", 2), ("no_shard", "full_shard", 2), ("no_shard", "hybrid_shard", 4)],
    ids=str,
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_parts_under_several_strategies(
    strategies: tuple[str, str, int], asynchronous: bool, ranks: RankPools, tmp_path: Path
) -> None:
    ranks(strategies[2]).run(_under_several_strategies, strategies, asynchronous, tmp_path)


def _under_several_strategies(strategies: tuple[str, str, int], asynchronous: bool, path: Path) -> None:
    one, two, world_size = strategies

    def each(model: nn.Module) -> None:
        Case(one, world_size).shard(model.one)
        Case(two, world_size).shard(model.two)

    model, optimizer = saved(path / "c", each, asynchronous=asynchronous)
    sw.checkpoint.wait(model)
    sw.checkpoint.verify(path / "c")
    other, fresh = build(each, seed=50)
    sw.checkpoint.load(path / "c", other, fresh)
    same(everything(other, fresh), everything(model, optimizer))


@on_ranks(2)
def test_parts_over_different_ranks_are_refused(tmp_path: Path) -> None:
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("apart", "shard"))["shard"]
    for one, two in ((None, alone), (alone, None)):
        model = Pair()
        sw.shard(model.one, mesh=one)
        sw.shard(model.two, mesh=two)
        for call in (sw.checkpoint.save, sw.checkpoint.load, sw.checkpoint.load_pretrained):
            with pytest.raises(UsageError, match=r"parts of this model are sharded over different ranks .*by itself"):
                call(tmp_path / "c", model)

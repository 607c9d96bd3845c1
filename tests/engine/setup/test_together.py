"""One unit of several modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.engine.lookup import require_engine
from shardwise.errors import ConfigError, UsageError
from tests import device
from tests.engine.cases import AT_MOST_TWO_AND_FOUR, Case
from tests.engine.rig import Net, Twins, batch, count, on_ranks, recording, seeded, squares, unwarned
from tests.ranks import RankPools


class Ends(Net):
    """A model with a norm and a head at the end, like transformers."""

    def __init__(self) -> None:
        super().__init__(depth=3)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(self.norm(x))  # type: ignore[no-any-return]


def in_parts(pair: tuple[str, str], **options: Any) -> Any:
    """Return a function that shards each block, and then a pair of modules as one unit, in FSDP2's style."""

    def shard_parts(model: nn.Module) -> None:
        for block in model.blocks:  # type: ignore[union-attr]
            sw.shard(block, **options)
        together = [model.get_submodule(name) for name in pair]
        assert sw.shard(together, **options) is together

    return shard_parts


@pytest.mark.parametrize("pair", [("norm", "leave"), ("enter", "leave")])
@pytest.mark.parametrize("case", AT_MOST_TWO_AND_FOUR, ids=str)
def test_trained_as_one_unit(ranks: RankPools, case: Case, pair: tuple[str, str]) -> None:
    ranks(case.world_size).run(_together, case, pair)


def _together(case: Case, pair: tuple[str, str]) -> None:
    """Train with a pair of modules as one unit, called one after the other or not."""
    options: dict[str, Any] = {"strategy": case.strategy, "reshard_after_forward": case.reshard}
    if case.replicas > 1 and case.shards > 1:
        options["mesh"] = init_device_mesh(device.kind(), (case.replicas, case.shards))
    with unwarned():
        twins = Twins(Ends, first=in_parts(pair, **options), **options)
        if case.world_size == 2:
            twins.train(3)
        for _ in range(2):
            with sw.no_sync(twins.sharded):
                twins.backward()
            twins.backward()
            for p, q in zip(twins.plain.parameters(), twins.sharded.parameters(), strict=True):
                torch.testing.assert_close(q.grad.full_tensor(), p.grad)  # type: ignore[union-attr, operator]
            for optimizer in twins.optimizers:
                optimizer.zero_grad()
    unit = twins.unit("+".join(pair))
    names = [name for name, _ in twins.plain.named_parameters()]
    assert {fqn for group in unit.groups for fqn in group.fqns} == {n for n in names if n.startswith(pair)}
    assert [p.fqn for p in twins.sharded.parameters()] == names  # type: ignore[attr-defined]
    assert "+".join(pair) in sw.describe(twins.sharded)


@on_ranks(2)
def test_one_gather_for_calls_in_a_row() -> None:
    """Once the order is known, in forward, in backward, and without gradients."""
    with recording():
        twins = Twins(Ends, first=in_parts(("norm", "leave")))
        twins.train(2)
        engine = twins.engine
        before = count(engine, "all_gather")
        twins.train(1)
        gathers = count(engine, "all_gather") - before
        assert gathers == 1 + 3 + 1 + 3, f"{gathers}: the norm and the head stay for backward"
        for _ in range(2):
            with torch.no_grad():
                twins.sharded(batch(0))
        before = count(engine, "all_gather")
        with torch.no_grad():
            twins.sharded(batch(0))
        assert count(engine, "all_gather") - before == 1 + 3 + 1


@on_ranks(1, 2)
def test_without_a_module_around() -> None:
    plain, model = seeded(Ends), seeded(Ends)
    sw.shard([model.norm, model.leave])  # type: ignore[list-item]
    optimizers = [torch.optim.SGD([*m.norm.parameters(), *m.leave.parameters()], lr=0.1) for m in (plain, model)]  # type: ignore[union-attr]
    for step in range(3):
        losses = [m.leave(m.norm(batch(step, 0, 5, 6))).square().mean() for m in (plain, model)]  # type: ignore[operator]
        assert torch.equal(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_an_exception_between_its_modules() -> None:
    twins = Twins(Ends, first=in_parts(("norm", "leave")))
    twins.train(1)
    handle = twins.sharded.norm.register_forward_hook(lambda *_: 1 / 0)  # type: ignore[union-attr]
    with pytest.raises(ZeroDivisionError):
        squares(twins.sharded, batch(0)).backward()
    handle.remove()
    twins.train(2)


@on_ranks(1, 2)
def test_a_copy_of_the_model() -> None:
    model = Twins(Ends, first=in_parts(("norm", "leave"))).sharded
    replica = copy.deepcopy(model)
    assert torch.equal(replica(batch(0)), model(batch(0)))
    assert [unit.fqn for unit in require_engine(replica).units] == [unit.fqn for unit in require_engine(model).units]


@on_ranks(1, 2)
def test_modules_without_parameters_are_left_alone() -> None:
    """Every module is asked for, from the inside out."""

    def every_module(model: nn.Module) -> None:
        model.blocks[0].act = nn.Tanh()  # type: ignore[union-attr, index]
        for module in [*model.modules()][:0:-1]:
            if not isinstance(module, nn.ModuleList):
                assert sw.shard(module) is module

    twins = Twins(Ends, first=every_module, slots=4)
    assert "blocks.0.act" not in [unit.fqn for unit in twins.engine.units]
    twins.train(2)


@on_ranks(1)
def test_what_is_refused() -> None:
    model: Any = seeded(Ends)
    with pytest.raises(ConfigError, match="do not contain one another"):
        sw.shard([model.blocks[0], model.blocks[0].norm])
    with pytest.raises(ConfigError, match="leave units out"):
        sw.shard([model.norm, model.leave], units=[nn.Linear])
    with pytest.raises(ConfigError, match="a list of them, not a list"):
        sw.shard([])
    holder = nn.Sequential(model.norm)
    sw.shard([model.norm, model.leave])
    with pytest.raises(UsageError, match="LayerNorm, Linear were sharded together, but not all of them"):
        sw.shard(holder)
    with pytest.raises(UsageError, match="together, but not all of them are in this list"):
        sw.shard([model.norm])
    sw.shard(model)
    model(batch(0))

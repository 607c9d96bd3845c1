"""Full parameters outside forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import UsageError
from shardwise.sharded.extensions.waiting import WaitingGradient
from tests.engine.rig import Block, Net, Twins, batch, on_ranks, seeded, squares

STRATEGIES = ["full_shard", "shard_grad_op", "no_shard"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(1, 2)
def test_writeback(strategy: str) -> None:
    twins = Twins(strategy=strategy)
    twins.train(1)
    with sw.unsharded(twins.sharded), torch.no_grad():
        for name, p in twins.sharded.named_parameters():
            assert type(p) is nn.Parameter
            assert torch.equal(p, twins.plain.get_parameter(name))
            p.add_(1.0)  # lost: no writeback
    twins.train(1)
    for model in (twins.plain, twins.sharded):
        context = sw.unsharded(model, writeback=True) if model is twins.sharded else torch.no_grad()
        with context, torch.no_grad():
            for p in model.parameters():
                p.mul_(0.75)
    twins.same_parameters()
    twins.train(2)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_rank0_only_and_cpu(strategy: str) -> None:
    twins = Twins(strategy=strategy)
    with sw.unsharded(twins.sharded, rank0_only=True, cpu=True):
        kinds = {type(p) for p in twins.sharded.parameters()}
    assert kinds == {nn.Parameter if dist.get_rank() == 0 else sw.ShardedParameter}
    with pytest.raises(UsageError, match="rank0_only"), sw.unsharded(twins.sharded, writeback=True, rank0_only=True):
        pass
    twins.train(1)


@on_ranks(2)
def test_forward_inside_and_what_is_refused() -> None:
    twins = Twins()
    twins.train(1)
    with sw.unsharded(twins.sharded):
        assert torch.equal(twins.sharded(batch(0)), twins.plain(batch(0)))
        assert set(twins.sharded.state_dict()) == set(twins.plain.state_dict())
        grads = torch.autograd.grad(squares(twins.sharded, batch(0)), list(twins.sharded.parameters()))
        expected = torch.autograd.grad(squares(twins.plain, batch(0)), list(twins.plain.parameters()))
        assert all(torch.equal(grad, other) for grad, other in zip(grads, expected, strict=True))
    twins.train(1)

    class Asks(Block):
        def forward(self, x: Tensor) -> Tensor:
            with sw.unsharded(model):
                return super().forward(x)

    model: Any = sw.shard(seeded(lambda: Net(block=Asks)))
    with pytest.raises(UsageError, match="inside a forward"):
        model(batch(0))


@on_ranks(2)
def test_leaving_by_an_exception_restores_the_sharded_model() -> None:
    twins = Twins()
    with pytest.raises(ValueError, match="on purpose"), sw.unsharded(twins.sharded):
        raise ValueError("on purpose")
    twins.train(1)


@on_ranks(2)
def test_full_state_dict() -> None:
    twins = Twins()
    twins.train(1)
    for rank0_only in (True, False):
        full = sw.full_state_dict(twins.sharded, rank0_only=rank0_only)
        if rank0_only and dist.get_rank():
            assert not full
        else:
            assert list(full) == list(twins.plain.state_dict())
            assert all(torch.equal(full[name], value) for name, value in twins.plain.state_dict().items())


class Writes(Block):
    """Changes its own parameter while running."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(1, 2)
def test_writing_a_gathered_parameter_in_forward_raises(strategy: str, grad: bool) -> None:
    """Unless the gathered parameter is the shard itself and no replica has another: then nothing is lost."""
    model: Any = sw.shard(seeded(lambda: Net(block=Writes)), strategy)
    before = model.blocks[0].up.weight.full_tensor()
    with torch.set_grad_enabled(grad):
        if dist.get_world_size() == 1:
            model(batch(0))
            assert torch.equal(model.blocks[0].up.weight.full_tensor(), before * 0.5)
        else:
            with pytest.raises(UsageError, match=r"'blocks.0.up.weight'.*in place.*sw.unsharded\(model, writeback"):
                model(batch(0))
            if strategy != "no_shard":
                assert torch.equal(model.blocks[0].up.weight.full_tensor(), before)
    embedding = nn.Sequential(nn.Embedding(9, 4, max_norm=0.1), nn.Linear(4, 2))
    if dist.get_world_size() == 2:
        with pytest.raises(UsageError, match=r"'0.weight'.*in place"):
            sw.shard(embedding, strategy)(torch.tensor([[1, 2]]))


# Parts of models and several models -----------------------------------------------------------------------------------


class Pair(nn.Module):
    """Around two sharded models."""

    def __init__(self, strategy: str) -> None:
        super().__init__()
        self.first = sw.shard(seeded(Net), strategy)
        self.second = sw.shard(seeded(Net), strategy)
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_what_lies_below_a_module_of_a_sharded_model_is_opened(strategy: str) -> None:
    twins = Twins(strategy=strategy)
    twins.train(1)
    plain, sharded = twins.plain.blocks[1], twins.sharded.blocks[1]  # type: ignore[index]
    x = batch(0, None, 5, 6)
    with sw.unsharded(sharded, writeback=True), torch.no_grad():
        kinds = {name: type(p) for name, p in twins.sharded.named_parameters()}
        assert {name for name, kind in kinds.items() if kind is nn.Parameter} == {
            name for name in kinds if name.startswith("blocks.1.")
        }
        assert torch.equal(sharded(x), plain(x))
        for module in (plain, sharded):
            module.up.weight.mul_(0.5)
    twins.same_parameters()
    with sw.unsharded(sharded.up), sw.unsharded(twins.sharded.leave):  # type: ignore[arg-type]
        assert torch.equal(sharded.up.weight, plain.up.weight)
        assert torch.equal(twins.sharded.leave.weight, twins.plain.leave.weight)  # type: ignore[union-attr, arg-type]
        assert isinstance(sharded.down.weight, sw.ShardedParameter)
        with pytest.raises(UsageError, match=r"'blocks.1.up.weight' unsharded already"), sw.unsharded(sharded):
            pass
    twins.train(2)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_every_model_below_a_module_is_opened(strategy: str) -> None:
    pair = Pair(strategy)
    with sw.unsharded(pair, writeback=True), torch.no_grad():
        assert all(type(p) is nn.Parameter for p in pair.parameters())
        pair.first.leave.weight.fill_(2.0)  # type: ignore[union-attr, operator]
        pair.second.leave.weight.fill_(3.0)  # type: ignore[union-attr, operator]
    full = sw.full_state_dict(pair, rank0_only=False)
    assert (full["first.leave.weight"] == 2).all()
    assert (full["second.leave.weight"] == 3).all()
    assert torch.equal(pair.second(batch(0)), pair.second(batch(0)))
    with sw.unsharded(pair, rank0_only=True):
        kinds = {type(p) for p in (*pair.first.parameters(), *pair.second.parameters())}
    assert kinds == {nn.Parameter if dist.get_rank() == 0 else sw.ShardedParameter}


@on_ranks(2)
def test_full_state_dicts_of_parts() -> None:
    twins = Twins()
    part = sw.full_state_dict(twins.sharded.blocks[2], rank0_only=False)  # type: ignore[index]
    expected = twins.plain.blocks[2].state_dict()  # type: ignore[index, union-attr]
    assert list(part) == list(expected)
    assert all(torch.equal(part[name], value) for name, value in expected.items())
    with pytest.raises(UsageError, match="ReLU is not sharded"):
        sw.full_state_dict(nn.ReLU())


@on_ranks(2)
def test_no_sync_of_a_module_around_several_models_is_for_all_of_them() -> None:
    pair = Pair("full_shard")
    with sw.no_sync(pair):
        (squares(pair.first, batch(0)) + squares(pair.second, batch(0))).backward()
    assert all(isinstance(p.grad, WaitingGradient) for p in (*pair.first.parameters(), *pair.second.parameters()))
    (squares(pair.first, batch(1)) + squares(pair.second, batch(1))).backward()
    for first, second in zip(pair.first.parameters(), pair.second.parameters(), strict=True):
        assert torch.equal(first.grad.full_tensor(), second.grad.full_tensor())
    with pytest.raises(UsageError, match="not sharded"), sw.no_sync(torch.nn.Linear(2, 2)):
        pass


@pytest.mark.parametrize("grad", [True, False])
@on_ranks(2)
def test_export(grad: bool) -> None:
    """A sharded model is not exported; inside `sw.unsharded` one rank exports what it computes."""
    twins = Twins()
    twins.train(1)
    x = batch(0)
    with torch.set_grad_enabled(grad):
        with pytest.raises(UsageError, match=r"^torch\.export of a sharded model.* inside sw\.unsharded"):
            torch.export.export(twins.sharded, (x,))
        with sw.unsharded(twins.sharded, rank0_only=True):
            program = torch.export.export(twins.sharded, (x,)) if dist.get_rank() == 0 else None
    if program is not None:
        assert torch.equal(program.module()(x), twins.plain(x))
    twins.train(1)

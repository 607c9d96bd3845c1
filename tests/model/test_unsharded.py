"""Full parameters outside forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import UsageError
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
    """Unless the gathered parameter is the shard itself: then nothing is lost."""
    model: Any = sw.shard(seeded(lambda: Net(block=Writes)), strategy)
    before = model.blocks[0].up.weight.full_tensor()
    with torch.set_grad_enabled(grad):
        if strategy == "no_shard" or dist.get_world_size() == 1:
            model(batch(0))
            assert torch.equal(model.blocks[0].up.weight.full_tensor(), before * 0.5)
        else:
            with pytest.raises(UsageError, match=r"'blocks.0.up.weight'.*in place.*sw.unsharded\(model, writeback"):
                model(batch(0))
            assert torch.equal(model.blocks[0].up.weight.full_tensor(), before)
    embedding = nn.Sequential(nn.Embedding(9, 4, max_norm=0.1), nn.Linear(4, 2))
    if strategy == "full_shard" and dist.get_world_size() == 2:
        with pytest.raises(UsageError, match=r"'0.weight'.*in place"):
            sw.shard(embedding)(torch.tensor([[1, 2]]))

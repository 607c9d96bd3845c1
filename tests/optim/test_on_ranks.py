"""Sharded parameters, clipping and scaling over the collectives that training uses."""

import math

import pytest
import torch
from torch import nn

from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.fsdp.torch_collectives import collectives_for
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.scaler import GradScaler
from tests.ranks import RankPools
from tests.sharded.threads import cut, randn

SHAPES = [(5, 3), (7,), (0,), (), (16, 4)]


def train() -> list[list[float]]:
    """Two steps, the second of which overflows on rank 0; the parameters, the norm and the scale."""
    group = collectives_for(None, "cpu")
    parameters = [nn.Parameter(p) for p in cut(group, randn(*SHAPES))]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    scaler = GradScaler("cpu", init_scale=2.0)
    for overflow in (1.0, math.inf):
        gradients = randn(*SHAPES, seed=1)
        gradients[0][0, 0] *= overflow
        for parameter, gradient in zip(parameters, cut(group, gradients), strict=True):
            parameter.grad = gradient
        norms = [
            torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], order)
            for order in (1.0, 2.0, math.inf)
        ]
        if overflow == 1.0:
            norm = clip_grad_norm_(parameters, 1.0)
            assert torch.equal(norm, norms[1])
        else:
            assert all(norm.isinf() for norm in norms)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
    assert all(isinstance(p, ShardedParameter) and p.isfinite().all() for p in parameters)
    largest = max(p.max().item() for p in parameters if p.numel())
    return [[norm.item(), scaler.get_scale(), largest], *(p.full_tensor().flatten().tolist() for p in parameters)]


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_every_rank_gets_the_unsharded_result(ranks: RankPools, transport: str) -> None:
    whole = [nn.Parameter(t) for t in randn(*SHAPES)]
    for parameter, gradient in zip(whole, randn(*SHAPES, seed=1), strict=True):
        parameter.grad = gradient
    norm = torch.nn.utils.clip_grad_norm_(whole, 1.0)
    for parameter in whole:  # as the scaler does
        assert parameter.grad is not None
        parameter.grad /= 2
    torch.optim.AdamW(whole, lr=0.1, fused=True).step()
    first, second = ranks(2, SHARDWISE_COLLECTIVES=transport).run(train)
    assert first == second
    assert first[0][:2] == [pytest.approx(norm.item()), 1.0]
    assert first[0][2] == max(flat for several in first[1:] for flat in several)
    for ours, theirs in zip(first[1:], whole, strict=True):
        torch.testing.assert_close(torch.tensor(ours), theirs.detach().flatten())

"""Reductions come in one order on every rank, whichever gradients each of them has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.engine.rig import Net, Twins, on_ranks


class Mixture(nn.Module):
    """A residual block that sends its input to one expert of three; the numbers say to which."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = int(x.detach().abs().sum() * 1000) % len(self.experts)
        return x + torch.tanh(self.experts[chosen](self.norm(x)))


def mixtures() -> nn.Module:
    return Net(depth=6, block=Mixture)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"])
@on_ranks(2, 3)
def test_experts_that_only_some_ranks_use(strategy: str) -> None:
    Twins(mixtures, strategy=strategy, units={Mixture}).train(steps=4)


class Tables(nn.Module):
    """Units whose input wants no gradient, more of them than slots; a rank looks into only some tables."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(10, 6) for _ in range(6))
        self.leave = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        index = (x[:, 0].abs() * 3).long().clamp(max=9)
        rows = [table(index).tanh() for table in self.tables]
        used = [row for row in rows if int(row.detach().sum() * 1000) % 2] or rows[:1]
        unused = [0.0 * row.sum() for row in rows]
        return self.leave(torch.stack(used).sum(0)) + torch.stack(unused).sum()  # type: ignore[no-any-return]


@on_ranks(2, 3)
def test_units_whose_inputs_want_no_gradient() -> None:
    Twins(Tables, units={nn.Embedding}).train(steps=4)

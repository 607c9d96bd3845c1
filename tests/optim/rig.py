"""What the tests of optimizers share: models and a comparison of states."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.fsdp.sharded_parameter import ShardedParameter
from tests.engine.rig import Net, Twins


class Tied(Net):
    """Two blocks share a matrix, of which the root is the owner; one block is frozen, and a part of another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight  # type: ignore[union-attr]
        self.blocks[1].requires_grad_(False)
        self.blocks[3].norm.requires_grad_(False)  # type: ignore[union-attr]


class Late(Net):
    """The first and the last block's weights are read again by the model, before and after their own calls."""

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.blocks[0].up.weight, self.blocks[3].up.weight  # type: ignore[union-attr]
        x = self.enter(x)
        x = x + F.linear(x, last)[:, :6]
        for block in self.blocks:
            x = block(x)
        return self.leave(x + F.linear(x, first)[:, :6])  # type: ignore[no-any-return]


class Twice(Net):
    """Every block is called twice, the second one only on even ranks' batches and the third never."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for index in (0, 3, 1, 0, 3):
            x = self.blocks[index](x)
        return self.leave(x)  # type: ignore[no-any-return]


def same_states(twins: Twins) -> None:
    plain, ours = twins.optimizers
    for p, q in zip(twins.plain.parameters(), twins.sharded.parameters(), strict=True):
        assert plain.state[p].keys() == ours.state[q].keys()
        for name, value in plain.state[p].items():
            other = ours.state[q][name]
            whole = other.full_tensor() if isinstance(other, ShardedParameter) else other
            assert torch.equal(torch.as_tensor(whole), torch.as_tensor(value)), name

"""What several tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.rig import Net


class Mixture(nn.Module):
    """A residual block that sends its input to one of three experts, chosen by the input's numbers."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = int(x.detach().abs().sum() * 1000) % len(self.experts)
        return x + torch.tanh(self.experts[chosen](self.norm(x)))


def mixtures() -> nn.Module:
    return Net(depth=6, block=Mixture)


class LentTable(nn.Embedding):
    """An embedding that is read after its forward, while its strategy keeps its parameters."""

    def forward(self, index: Tensor) -> Any:
        weight = self.weight
        return lambda: nn.functional.embedding(index, weight)


class OnlySome(nn.Module):
    """A model with more tables than slots, whose outputs the engine does not see. Each rank reads other tables, in
    another order."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(LentTable(10, 6) for _ in range(8))
        self.leave = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        index = (x[:, 0].abs() * 3).long().clamp(max=9)
        generator = torch.Generator().manual_seed(int(x.abs().sum() * 1000))
        chosen = torch.randperm(len(self.tables), generator=generator)[:4].tolist()
        lent = [table(index) for table in self.tables]
        total = torch.zeros(())
        for table in chosen:  # backward goes through them the other way round
            total = torch.tanh(total + lent[table]())
        return self.leave(total)  # type: ignore[no-any-return]

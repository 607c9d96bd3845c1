"""What several tests share."""

from __future__ import annotations

from torch import Tensor, nn

from tests.engine.rig import Block


class Tied(nn.Module):
    """A model whose head is tied to its embedding, and in which two blocks share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[3].up.weight = self.blocks[1].up.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed((x.abs() * 3).long().clamp(max=10)).sum(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

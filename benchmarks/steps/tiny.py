"""Models so small that only the engine's own Python is left to measure."""

from torch import Tensor, nn

WIDTH = 16


class TinyBlock(nn.Module):
    """Two linear layers and a norm of a few hundred parameters: one unit."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, width]
        out: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return out


class TinyStack(nn.Module):
    """A chain of tiny blocks."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TinyBlock() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, width]
        for block in self.blocks:
            x = block(x)
        return x


class Scale(nn.Module):
    """One small matrix parameter and nothing else: a unit of exactly one parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, width]
        out: Tensor = self.linear(x)
        return out


class ScaleStack(nn.Module):
    """A model of many small parameters, each in a module of its own."""

    def __init__(self, parameters: int, width: int) -> None:
        super().__init__()
        self.scales = nn.ModuleList(Scale(width) for _ in range(parameters))

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, width]
        for scale in self.scales:
            x = scale(x)
        return x

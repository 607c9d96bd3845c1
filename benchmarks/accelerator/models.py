"""What the checks train."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common.gpt import GPT, GPTShape

SMALL = GPTShape(layers=3, width=256, heads=4, vocab=512, seq=64)
"""Every parameter's numel is a multiple of 256, so that in a slot, too, each begins on a boundary of 512 bytes:
libraries then choose the same kernels for it as for a plain tensor."""
TINY = GPTShape(layers=2, width=32, heads=2, vocab=64, seq=16)


@dataclass(frozen=True)
class LlamaShape:
    """One block's sizes; the defaults are Llama 2 7B's, 202 M parameters."""

    width: int = 4096
    hidden: int = 11008
    heads: int = 32

    @property
    def numel(self) -> int:
        return 4 * self.width**2 + 3 * self.width * self.hidden + 2 * self.width


class LlamaBlock(nn.Module):
    """A pre-norm block: causal attention (without rotation), then a gated MLP. No biases."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        width, hidden, self.heads = shape.width, shape.hidden, shape.heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, seq, width]
        y = self.attention_norm(x)
        q, k, v = (linear(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, heads, seq, width / heads]
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class LlamaStack(nn.Module):
    """Blocks and nothing else."""

    def __init__(self, blocks: int, shape: LlamaShape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, seq, width]
        for block in self.blocks:
            x = block(x)
        return x


class FedGPT(GPT):
    """Says what a dry run must feed it."""

    def example_inputs(self, micro_batch: int, seq_len: int) -> dict[str, Tensor]:
        tokens = torch.zeros(micro_batch, seq_len, dtype=torch.int64)
        return {"tokens": tokens, "targets": tokens.clone()}


class Odd(nn.Module):
    """A block whose sizes nothing divides."""

    def __init__(self, width: int = 37) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:  # x: [..., width]
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class OddNet(nn.Module):
    """Blocks of odd sizes, with a loss as the GPT has it."""

    def __init__(self, vocab: int, width: int = 37, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Odd(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # both [batch, seq], int64
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def seeded(build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """The same numbers each time, drawn on the CPU."""
    torch.manual_seed(7)
    return build().to(device)

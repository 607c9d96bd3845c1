"""The GPT that every engine trains in the benchmarks: 98 M parameters at its default shape."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

INIT_STD = 0.02


@dataclass(frozen=True)
class GPTShape:
    """The sizes of a GPT; the defaults make 98 M parameters."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocab: int = 8192
    seq: int = 256

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")


class Block(nn.Module):
    """One pre-norm transformer block: causal attention, then a GELU MLP four times as wide."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_up = nn.Linear(width, 4 * width)
        self.mlp_down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, seq, width]
        x = x + self._attend(self.attention_norm(x))
        hidden = F.gelu(self.mlp_up(self.mlp_norm(x)))
        out: Tensor = x + self.mlp_down(hidden)
        return out

    def _attend(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        split = self.qkv(x).view(batch, seq, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)  # each [batch, heads, seq, width / heads]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return out


class GPT(nn.Module):
    """A decoder-only language model with an untied head whose forward returns the mean loss."""

    def __init__(self, shape: GPTShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.token_embedding = nn.Embedding(shape.vocab, shape.width)
        self.position_embedding = nn.Embedding(shape.seq, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.final_norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        self._initialise(seed)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """Draw every matrix from one generator in module order, so that all ranks start equal."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.is_meta:
                module.weight.normal_(0.0, INIT_STD, generator=generator)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # both [batch, seq], int64
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.final_norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(shape: GPTShape, batch_size: int, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Return this rank's tokens and next-token targets of one step, the same for every engine.

    Tokens follow a noisy ramp instead of pure noise, so that a falling loss shows that training works.
    """
    generator = torch.Generator().manual_seed(1_000_003 * (step + 1) + rank)
    start = torch.randint(shape.vocab, (batch_size, 1), generator=generator)
    stride = torch.randint(1, 4, (batch_size, shape.seq + 1), generator=generator)
    sequence = (start + stride.cumsum(1)) % shape.vocab
    return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()

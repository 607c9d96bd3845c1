"""MPT, the GPT-style model of llm-foundry's benchmarks: learned positions, biases, GELU, a tied head.

Shapes: b batch, s sequence, d width, v vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class MPTShape:
    layers: int
    width: int
    heads: int
    vocab: int
    seq_len: int


class Attention(nn.Module):
    def __init__(self, shape: MPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.Wqkv = nn.Linear(shape.width, 3 * shape.width)
        self.out_proj = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.Wqkv(x).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, 4 * width)
        self.down_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


class Block(nn.Module):
    def __init__(self, shape: MPTShape) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(shape.width)
        self.attn = Attention(shape)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.ffn = FeedForward(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x))
        return x + self.ffn(self.norm_2(x))


class MPT(nn.Module):
    def __init__(self, shape: MPTShape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocab, shape.width)
        self.wpe = nn.Embedding(shape.seq_len, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm_f = nn.LayerNorm(shape.width)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[b, s] -> logits [b, s, v]."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.wte(input_ids) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm_f(x), self.wte.weight)

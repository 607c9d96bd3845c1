"""Llama, as torchtitan writes it; a LayerNorm and an ungated MLP make the parallel GPT-NeoX blocks of StableCode.

Shapes: b batch, s sequence, d width, v vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaShape:
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    seq_len: int


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions. x: [b, s, heads, head_dim]; angles: [s, head_dim / 2], complex."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles[:, None]).flatten(3).to(x.dtype)


class RMSNorm(nn.Module):
    """As torchtitan and litgpt wrote it: in operations of their own, of which autograd keeps fp32 copies."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        return normed.to(x.dtype) * self.weight


class Attention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.width // shape.heads
        kv_width = shape.kv_heads * self.head_dim
        self.groups = shape.heads // shape.kv_heads
        self.wq = nn.Linear(shape.width, shape.width, bias=False)
        self.wk = nn.Linear(shape.width, kv_width, bias=False)
        self.wv = nn.Linear(shape.width, kv_width, bias=False)
        self.wo = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, angles), rotate(k, angles)
        if self.groups > 1:
            k, v = (t.repeat_interleave(self.groups, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.width, shape.hidden, bias=False)
        self.w2 = nn.Linear(shape.hidden, shape.width, bias=False)
        self.w3 = nn.Linear(shape.width, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.ffn_norm = RMSNorm(shape.width)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.output = nn.Linear(shape.width, shape.vocab, bias=False)
        turns = torch.empty(shape.seq_len, shape.width // shape.heads // 2, dtype=torch.complex64)
        self.register_buffer("angles", turns, persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[b, s] -> logits [b, s, v]."""
        x = self.tok_embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.output(self.norm(x))


class LlamaLoss(Llama):
    """Returns the loss of its logits as they are, as Thunder's benchmark of litgpt takes it."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(input_ids).flatten(0, 1), labels.flatten())


class NeoXBlock(nn.Module):
    """Attention and MLP side by side, a quarter of each head rotated."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1 = nn.LayerNorm(shape.width)
        self.attn = nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.fc = nn.Linear(shape.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.attn(self.norm_1(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, dim=-1)
        q, k = (self.rotate(t, cos, sin) for t in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = self.proj(out.transpose(1, 2).flatten(2))
        return self.down(F.gelu(self.fc(self.norm_2(x)))) + attended + x

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        first, second = turned.chunk(2, dim=-1)
        turned = (turned * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
        return torch.cat((turned, kept), dim=-1)


class NeoX(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(NeoXBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        for name in ("cos", "sin"):
            angles = torch.empty(shape.seq_len, shape.width // shape.heads // 4)
            self.register_buffer(name, angles, persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[b, s] -> logits [b, s, v]."""
        x = self.wte(input_ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


class NeoXLoss(NeoX):
    """As `LlamaLoss`."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(input_ids).flatten(0, 1), labels.flatten())

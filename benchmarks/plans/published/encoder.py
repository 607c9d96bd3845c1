"""The `SimpleTransformer` of DeepSpeed's bf16 master weight example: post-norm layers, no mask, a head with bias."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class EncoderShape:
    layers: int
    width: int
    heads: int
    hidden: int
    vocab: int
    seq_len: int


class SimpleTransformer(nn.Module):
    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.pos_embedding = nn.Embedding(shape.seq_len, shape.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                shape.width, shape.heads, shape.hidden, dropout=0.0, activation="gelu", batch_first=True
            )
            for _ in range(shape.layers)
        )
        self.output = nn.Linear(shape.width, shape.vocab)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[b, s] -> logits [b, s, v]."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embedding(input_ids) + self.pos_embedding(positions)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)

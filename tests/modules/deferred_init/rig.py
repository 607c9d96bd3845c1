"""What several tests share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.architectures import ARCHITECTURES, without_dropout

Build = Callable[[], nn.Module]


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def on_meta(build: Build) -> nn.Module:
    with torch.device("meta"):
        return build()


def transformer(name: str, **changes: Any) -> nn.Module:
    import transformers

    architecture = ARCHITECTURES[name]
    config = transformers.AutoConfig.for_model(architecture.model_type, **{**architecture.config, **changes})
    model: nn.Module = getattr(transformers, architecture.head).from_config(without_dropout(config))
    return model


class Everything(nn.Module):
    """Modules of torch that draw, with a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 12, padding_idx=3)
        self.convolution = nn.Conv2d(3, 5, 3)
        self.normalisation = nn.BatchNorm1d(5)
        self.lstm = nn.LSTM(5, 7)
        self.attention = nn.MultiheadAttention(12, 3)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(12, 3, 24) for _ in range(3))
        self.bilinear = nn.Bilinear(3, 4, 5)
        self.final = nn.LayerNorm(12)
        self.head = nn.Linear(12, 37, bias=False)
        self.head.weight = self.embedding.weight


class Awkward(nn.Module):
    """Initialises itself and its child, asks for values and sets seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(30, 7))
        self.register_buffer("positions", torch.empty(5))
        self.linear = nn.Linear(3, 4)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.3)
        self.get_buffer("positions").copy_(torch.arange(5.0))
        self.weight[0] = 0
        self.linear.weight.mul_(self.weight.abs().max())
        if not self.weight.is_meta and self.weight.mean() > 0:
            self.weight.neg_()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.linear.bias.data.normal_()


def awkward() -> nn.Module:
    return nn.Sequential(Awkward(), nn.Linear(4, 4), Awkward())


class Rewritten(nn.Module):
    """A last layer of zeros, in a block whose argument nobody keeps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 5), nn.Linear(5, width)
        nn.init.zeros_(self.down.weight)


class Rewriting(nn.Module):
    """As nanoGPT does it: children made, then all of them written by `apply`, then some by name."""

    def __init__(self, config: SimpleNamespace, scale: float = 1.0) -> None:
        super().__init__()
        self.config, self.scale = config, scale
        self.gain = nn.Parameter(torch.ones(3) * 2)
        self.blocks = nn.ModuleList(Rewritten(config.width) for _ in range(2))
        self.copies = nn.ModuleList(copy.deepcopy(self.blocks[0]) for _ in range(2))
        self.apply(self._init)
        for name, parameter in self.named_parameters():
            if name.endswith("down.weight"):
                nn.init.normal_(parameter, std=0.1 * scale)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.02)
            nn.init.zeros_(module.bias)


def rewriting() -> nn.Module:
    return Rewriting(SimpleNamespace(width=4), scale=0.5)

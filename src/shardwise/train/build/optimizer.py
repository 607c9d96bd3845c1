"""`train.optimizer`: torch's own, over sharded parameters or whole matrices; and the schedule of its learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise import accelerators
from shardwise.optim.whole_matrix import whole_matrix
from shardwise.train.config.schema import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW, fused where torch has a kernel, or Muon beside it; weight decay for parameters of two or more (global)
    dimensions only.

    Not collective. Call it after `sw.shard`. Raises UsageError for Muon of a model without hidden matrices.
    """
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [item for item in trainable if item[1].ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [item for item in trainable if item[1].ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    fused = all(accelerators.has_fused_adamw(parameter.device) for _, parameter in trainable)
    adamw: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": fused}
    if config.optimizer == "muon":
        return whole_matrix(
            torch.optim.Muon,
            groups,
            lr=config.lr,
            momentum=config.momentum,
            adjust_lr_fn="match_rms_adamw",
            adamw=adamw,
        )
    return torch.optim.AdamW([{**group, "params": [p for _, p in group["params"]]} for group in groups], **adamw)


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of each group, all but its parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def set_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> list[str]:
    """Give every group options that `options_of` gave; returns in words which settings that changes.

    The learning rate is not among the words: the schedule decides it at every step.
    """
    changes: dict[str, None] = {}
    for group, wanted in zip(optimizer.param_groups, options, strict=True):
        for key in ("betas", "eps", "weight_decay", "momentum"):
            if group.get(key) != wanted.get(key):
                changes[f"train.{key} was {_toml(group[key])} and is {_toml(wanted[key])}"] = None
        group.update(wanted)
    return list(changes)


def _toml(value: float | Sequence[float]) -> str:
    return str(list(value)) if isinstance(value, Sequence) else str(value)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """One learning rate for every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up to `lr`, then a fall to `lr * min_lr_ratio` at the last step."""

    lr: float
    steps: int
    warmup_steps: int = 0
    shape: str = "cosine"
    """"cosine", "linear" or "constant" (no fall)."""
    min_lr_ratio: float = 0.1

    @classmethod
    def of(cls, config: TrainConfig) -> Schedule:
        """The schedule of `[train]`."""
        return cls(config.lr, config.steps, config.warmup_steps, config.schedule, config.min_lr_ratio)

    def __call__(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0.

        Warm-up step i has lr * (i + 1) / warmup_steps, so that no step is wasted on a rate of 0 and step
        `warmup_steps - 1` reaches `lr`. The last step, `steps - 1`, has lr * min_lr_ratio; later ones keep it.
        """
        if step < self.warmup_steps:
            return self.lr * ((step + 1) / self.warmup_steps)  # the last one is lr to the bit
        if self.shape == "constant":
            return self.lr
        first = max(self.warmup_steps - 1, 0)  # the step that has the full rate
        progress = min((step - first) / max(self.steps - 1 - first, 1), 1.0)
        remaining = 1 - progress if self.shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * remaining)

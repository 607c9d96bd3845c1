"""`train.optimizer`: torch's own, over sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.train.config.schema import TrainConfig

_FUSED_DEVICES = frozenset({"cpu", "cuda"})


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW, fused where torch has a kernel; weight decay for parameters of two or more (global) dimensions only.

    Not collective. Call it after `sw.shard`.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = all(parameter.device.type in _FUSED_DEVICES for parameter in trainable)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=fused
    )


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of each group, all but its parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def set_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> list[str]:
    """Give every group options that `options_of` gave; returns in words which settings that changes.

    The learning rate is not among the words: the schedule decides it at every step.
    """
    changes: dict[str, None] = {}
    for group, wanted in zip(optimizer.param_groups, options, strict=True):
        for key in ("betas", "eps", "weight_decay"):
            if group[key] != wanted[key]:
                changes[f"train.{key} was {_toml(group[key])} and is {_toml(wanted[key])}"] = None
        group.update(wanted)
    return list(changes)


def _toml(value: float | Sequence[float]) -> str:
    return str(list(value)) if isinstance(value, Sequence) else str(value)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """One learning rate for every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr

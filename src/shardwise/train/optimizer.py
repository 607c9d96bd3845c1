"""`train.optimizer`: torch's own, over sharded parameters."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.train.config import TrainConfig

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


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """One learning rate for every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr

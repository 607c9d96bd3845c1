"""`train.optimizer`: AdamW and its variants over sharded parameters, and Muon over whole matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise import device_tools
from shardwise.optim.adamw_8bit import AdamW8bit
from shardwise.optim.adamw_bf16 import AdamWBF16
from shardwise.optim.whole_matrix import whole_matrix
from shardwise.train.config.schema import TrainConfig

_LESS_STATE: dict[str, type[AdamWBF16 | AdamW8bit]] = {"adamw-bf16": AdamWBF16, "adamw-8bit": AdamW8bit}


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Build the optimizer that `[train]` names: AdamW, fused where torch has a kernel; AdamW with moments in bf16 or 8
    bits; or Muon beside AdamW. Weight decay applies only to parameters of two or more (global) dimensions.

    Not collective. Call it after `sw.shard`. Raises UsageError for Muon and a model without hidden matrices.
    """
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [item for item in trainable if item[1].ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [item for item in trainable if item[1].ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    fused = all(device_tools.has_fused_adamw(parameter.device) for _, parameter in trainable)
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
    unnamed = [{**group, "params": [p for _, p in group["params"]]} for group in groups]
    if config.optimizer in _LESS_STATE:
        del adamw["fused"]
        return _LESS_STATE[config.optimizer](unnamed, **adamw)
    return torch.optim.AdamW(unnamed, **adamw)


def align_of(config: TrainConfig) -> int | None:
    """Return the `align` that the optimizer needs from `sw.shard`, in elements; None if it needs none."""
    return AdamW8bit.BLOCK_NUMEL if config.optimizer == "adamw-8bit" else None


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group: everything except its parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def set_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> list[str]:
    """Set every parameter group's options to those that `options_of` returned. Returns one line per changed setting.

    Changes of the learning rate are not listed, because the schedule sets it at every step.
    """
    changes: dict[str, None] = {}
    for group, wanted in zip(optimizer.param_groups, options, strict=True):
        for key in ("betas", "eps", "weight_decay", "momentum"):
            if group.get(key) != wanted.get(key):
                changes[f"train.{key} was {_toml(group[key])} and is now {_toml(wanted[key])}"] = None
        group.update(wanted)
    return list(changes)


def _toml(value: float | Sequence[float]) -> str:
    return str(list(value)) if isinstance(value, Sequence) else str(value)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr

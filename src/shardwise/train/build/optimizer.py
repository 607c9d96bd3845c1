"""`train.optimizer`: AdamW and its variants over sharded parameters, Muon over whole matrices, and users' own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise import device_tools
from shardwise.errors import ConfigError, NotOnPiecesError, one_line
from shardwise.optim.adamw_8bit import AdamW8bit
from shardwise.optim.adamw_bf16 import AdamWBF16
from shardwise.optim.whole_matrix import whole_matrix
from shardwise.plan.models.factory import load_function
from shardwise.train.config.schema import TrainConfig

_LESS_STATE: dict[str, type[AdamWBF16 | AdamW8bit]] = {"adamw-bf16": AdamWBF16, "adamw-8bit": AdamW8bit}
_RATIO = "lr_ratio"
"""Key of a group of a user's own optimizer: its learning rate over `train.lr`."""


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Build the optimizer that `[train]` names: AdamW, fused where torch has a kernel; AdamW with moments in bf16 or 8
    bits; Muon beside AdamW; or the user's own. Weight decay applies only to parameters of two or more (global)
    dimensions.

    Not collective. Call it after `sw.shard`. Raises UsageError for Muon and a model without hidden matrices, and
    ConfigError for a function that does not return an optimizer of all the model's trainable parameters.
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
    if is_own(config):
        return _own_optimizer(unnamed, dict(trainable), config)
    if config.optimizer in _LESS_STATE:
        del adamw["fused"]
        return _LESS_STATE[config.optimizer](unnamed, **adamw)
    return torch.optim.AdamW(unnamed, **adamw)


def is_own(config: TrainConfig) -> bool:
    """Return whether the user's own function makes the optimizer."""
    return ":" in config.optimizer


def _own_optimizer(
    groups: list[dict[str, Any]], trainable: Mapping[str, nn.Parameter], config: TrainConfig
) -> torch.optim.Optimizer:
    where = f"train.optimizer={config.optimizer!r}"
    function = load_function(config.optimizer, where, ConfigError, "the optimizer")
    try:
        optimizer = function(groups, config)
    except NotOnPiecesError as error:
        raise ConfigError(needs_whole_parameters(config, error)) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}, called with the parameter groups and [train]: {one_line(error)}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"{where} returned a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    names = {id(parameter): name for name, parameter in trainable.items()}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held - names.keys():
        raise ConfigError(f"{where} updates tensors that are not the model's trainable parameters: pass on the groups")
    left_out = [name for key, name in names.items() if key not in held]
    if left_out:
        raise ConfigError(f"{where} leaves out {len(left_out)} of the trainable parameters, such as {left_out[0]}")
    for group in optimizer.param_groups:
        group[_RATIO] = float(group["lr"]) / config.lr
    return optimizer


def needs_whole_parameters(config: TrainConfig, error: Exception) -> str:
    """Return the message for the user's own optimizer that asked for what a piece of a parameter cannot give."""
    why = str(error).partition(": ")[0]
    return (
        f"train.optimizer={config.optimizer!r} does not work with sharded parameters ({why}): return "
        "sw.optim.whole_matrix(YourOptimizer, groups, ...), which gives it whole matrices"
    )


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
    """Set the learning rate of every parameter group; of a user's own optimizer in the proportions that it began
    with."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(_RATIO, 1.0)

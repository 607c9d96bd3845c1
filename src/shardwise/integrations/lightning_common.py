"""Code that the strategies of lightning.pytorch and of Fabric share: options, precision, checkpoints."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import nn
from torch.optim import Optimizer

from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.loading import load
from shardwise.checkpoint.saving import save
from shardwise.engine.lookup import engine_of
from shardwise.engine.setup.shard import shard
from shardwise.errors import CheckpointError, UsageError
from shardwise.fsdp.strategy import Precision
from shardwise.optim.scaler import GradScaler
from shardwise.policy.settings import ARGUMENTS
from shardwise.policy.words import check_names

_OPTIONS = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "timeout")
"""Names of a strategy's keyword arguments that are passed on to Lightning."""
_COMPUTE = {"bf16-mixed": "bf16", "16-mixed": "fp16"}
_PLAIN = {"32-true", "64-true", "bf16-true", "16-true"}
_REST = "lightning.pt"
"""Name of the file in a checkpoint with Lightning's state: loops, callbacks and whatever the user adds."""


def taken_from(options: dict[str, Any]) -> dict[str, Any]:
    """Take Lightning's own arguments out of a strategy's, and return them. Raises ConfigError, naming the nearest, if
    one of the others is not an argument of `sw.shard`."""
    theirs = {name: options.pop(name) for name in _OPTIONS if name in options}
    check_names("ShardwiseStrategy", options, ARGUMENTS)
    return theirs


def shard_as(module: nn.Module, options: Mapping[str, Any], precision: str) -> None:
    """Shard a module, unless it is sharded already. Every rank must call this.

    Args:
        options: `sw.shard`'s arguments.
        precision: the name of Lightning's precision plugin. With mixed precision, weights are gathered in 16 bits,
            gradients are summed in fp32 and Lightning's autocast stays on in forward.

    Raises UsageError for a precision that is not supported.
    """
    if precision not in _COMPUTE.keys() | _PLAIN:
        raise UsageError(
            f"precision={precision!r}: must be one of {', '.join(sorted(_COMPUTE.keys() | _PLAIN))} with shardwise"
        )
    if engine_of(module) is not None:
        return
    options = dict(options)
    if options.get("precision") is None and precision in _COMPUTE:
        options["precision"] = Precision(param=_COMPUTE[precision], reduce="fp32", master="fp32", cast_inputs=False)
    shard(module, **options)


def sharded_in(module: nn.Module) -> nn.Module | None:
    """Return the one sharded model at or below a module, or None. Raises UsageError if there are several."""
    found = [below for below in module.modules() if engine_of(below, below=False) is not None]
    if len(found) > 1:
        raise UsageError(f"{type(module).__name__} has {len(found)} sharded models, but a checkpoint holds one")
    return found[0] if found else None


def save_directory(path: Path, module: nn.Module, optimizers: Sequence[Optimizer], rest: Mapping[str, Any]) -> None:
    """Write a shardwise checkpoint, and `rest` in a file of its own in it. Every rank must call this."""
    optimizer = _only(optimizers)
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    if is_first and path.is_file():
        path.unlink()
    save(path, module, optimizer, overwrite=True)
    if is_first:
        torch.save(dict(rest), path / _REST)


def _only(optimizers: Sequence[Optimizer]) -> Optimizer | None:
    if len(optimizers) > 1:
        raise UsageError(
            f"a checkpoint of a sharded model takes at most one optimizer, but there are {len(optimizers)}"
        )
    return optimizers[0] if optimizers else None


def load_directory(path: Path, module: nn.Module, optimizers: Sequence[Optimizer], strict: bool) -> None:
    """Load the shards that `save_directory` wrote, and optimizer state if it is there. Every rank must call this."""
    load(path, module, _only(optimizers) if has_optimizer(path) else None, strict=strict)


def load_rest(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Load the `rest` that `save_directory` wrote.

    Args:
        weights_only: as Lightning was given it. False may run code that the file names; None: True.

    Raises:
        CheckpointError: there is none, or it has objects that only `weights_only=False` loads.
    """
    try:
        rest: dict[str, Any] = torch.load(path / _REST, map_location="cpu", weights_only=weights_only is not False)
    except pickle.UnpicklingError:
        found = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(path / _REST))
        raise CheckpointError(
            f"{path / _REST} names {found}, which loading would call: if you trust the file, load it with "
            "weights_only=False"
        ) from None
    except FileNotFoundError:
        raise CheckpointError(f"{path} has no {_REST}: it is a checkpoint, but Lightning did not write it") from None
    return rest


def has_optimizer(path: Path) -> bool:
    """Whether a checkpoint directory has optimizer state."""
    return any(path.glob("optimizer*.safetensors"))


def scaler_for_shards(scaler: torch.amp.GradScaler, device: torch.device) -> GradScaler:
    """Return a shardwise GradScaler with the options and state of a scaler; the scaler itself if it is one already."""
    if isinstance(scaler, GradScaler):
        return scaler
    found = GradScaler(device=device.type, enabled=scaler.is_enabled())
    if scaler.is_enabled():
        found.load_state_dict(scaler.state_dict())
    return found


def check_checkpoint_io(plugin: object) -> None:
    """Raise UsageError for a CheckpointIO plugin other than the default one, which writes files with torch."""
    if plugin is not None and type(plugin) is not TorchCheckpointIO:
        raise UsageError(
            f"{type(plugin).__name__} would be ignored: ranks write a sharded model's checkpoint themselves, not "
            "through a CheckpointIO plugin; leave it out"
        )


def is_directory_of_ours(path: Path) -> bool:
    """Whether the path is a shardwise checkpoint."""
    return (path / manifest.NAME).is_file()

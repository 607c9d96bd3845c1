"""Lightning Fabric: `Fabric(strategy="shardwise")` after importing this module, or with a `ShardwiseStrategy(...)`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
    from lightning.fabric.strategies.strategy import _BackwardSyncControl, _validate_keys_for_strict_loading
except ImportError as error:
    raise ModuleNotFoundError(
        "shardwise.integrations.fabric needs Lightning: pip install lightning", name=error.name
    ) from error

from shardwise.engine.lookup import engine_of
from shardwise.engine.setup.torch_patches import give_sharded_parameters
from shardwise.errors import UsageError
from shardwise.integrations import lightning_common
from shardwise.model_tools.reduction import no_sync

__all__ = ["ShardwiseStrategy"]


class ShardwiseStrategy(DDPStrategy):
    """A Fabric strategy that shards modules, with one process a device like DDP.

    `fabric.save` of a state with one sharded module (and its optimizer) writes a shardwise checkpoint: a directory, in
    which another file holds the rest of the state.
    """

    def __init__(
        self, *, process_group_backend: str | None = None, start_method: Any = "popen", **options: Any
    ) -> None:
        """
        Args:
            process_group_backend: default: "nccl" for GPUs, "gloo" for CPUs.
            start_method: "popen" or "spawn", for processes that Fabric starts itself, without torchrun or a cluster.
            options: `sw.shard`'s arguments, and Lightning's own (`accelerator`, `timeout`, ...).
        """
        theirs = lightning_common.taken_from(options)
        super().__init__(process_group_backend=process_group_backend, start_method=start_method, **theirs)
        self._options = options
        self._backward_sync_control = _NoSync()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a module. Every rank must call this."""
        lightning_common.shard_as(module, self._options, str(self.precision.precision))
        module.to(self.root_device)  # moves buffers; shards are there already
        if (scaler := getattr(self.precision, "scaler", None)) is not None:
            self.precision.scaler = lightning_common.scaler_for_shards(scaler, self.root_device)
        return _Called(module)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Give the optimizer, which scripts build before `fabric.setup`, the sharded parameters."""
        give_sharded_parameters(optimizer)
        return optimizer

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the state under the module's own names, without a wrapper's prefix."""
        state: dict[str, Any] = super().get_module_state_dict(_bare(module))
        return state

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load a state with the module's own names, without a wrapper's prefix."""
        super().load_module_state_dict(_bare(module), state_dict, strict)

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: sharding moves the parameters, one shard at a time."""

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Have models built on the CPU, or on the meta device if `empty_init`: never whole on an accelerator."""
        return torch.device("meta") if empty_init else nullcontext()

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,  # noqa: A002
    ) -> None:
        """Write a checkpoint directory if the state has a sharded module, else a file. Every rank must call this."""
        modules, optimizers = _parts(state)
        if not modules:
            super().save_checkpoint(path, state, storage_options=storage_options, filter=filter)
            return
        if storage_options is not None or filter is not None:
            raise UsageError("fabric.save of a sharded module: storage_options and filter are not supported")
        lightning_common.check_checkpoint_io(self._checkpoint_io)
        if len(modules) > 1:
            raise UsageError(f"fabric.save: the state has {len(modules)} sharded modules, but a checkpoint holds one")
        ((module_name, module),) = modules.items()
        rest = {key: value for key, value in state.items() if key != module_name and key not in optimizers}
        rest = self._convert_stateful_objects_in_state(rest, filter={})
        lightning_common.save_directory(Path(self.broadcast(path)), module, list(optimizers.values()), rest)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a directory from `save_checkpoint`, or another strategy's file. Every rank must call this."""
        path = Path(self.broadcast(path))
        if not lightning_common.is_directory_of_ours(path):
            found: dict[str, Any] = super().load_checkpoint(path, state, strict=strict, weights_only=weights_only)
            return found
        if isinstance(state, nn.Module):
            state = {"model": state}
        modules, optimizers = _parts(state or {})
        if len(modules) != 1:
            raise UsageError(f"fabric.load: {path} holds one sharded module, but the state to load has {len(modules)}")
        (module,) = modules.values()
        rest = lightning_common.load_rest(path, weights_only)
        there = {*rest, *modules, *(optimizers if lightning_common.has_optimizer(path) else ())}
        _validate_keys_for_strict_loading(state.keys(), there, strict)  # before anything is overwritten
        lightning_common.load_directory(path, module, list(optimizers.values()), strict)
        for name, value in state.items():
            if name in modules or name in optimizers or name not in rest:
                continue
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(rest.pop(name))
            else:
                state[name] = rest.pop(name)
        return rest


class _Called(nn.Module):
    """Wrapper of a sharded module in the place of DDP's. Because of it Fabric runs methods that are marked as forward
    methods, and a LightningModule's steps, inside the module's forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class _NoSync(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        return no_sync(module) if enabled else nullcontext()


def _bare(value: Any) -> Any:
    return value.module if isinstance(value, _Called) else value


def _parts(state: Mapping[str, Any]) -> tuple[dict[str, nn.Module], dict[str, Optimizer]]:
    """Return the sharded modules in a state and their optimizers, by key."""
    bare = {key: _bare(value) for key, value in state.items()}
    modules = {key: value for key, value in bare.items() if isinstance(value, nn.Module) and engine_of(value)}
    ours = {id(parameter) for module in modules.values() for parameter in module.parameters()}
    optimizers = {
        key: value
        for key, value in state.items()
        if isinstance(value, Optimizer)
        and any(id(parameter) in ours for group in value.param_groups for parameter in group["params"])
    }
    return modules, optimizers


STRATEGY_REGISTRY.register("shardwise", ShardwiseStrategy, description="Fully sharded data parallelism by shardwise")

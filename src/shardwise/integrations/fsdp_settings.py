"""Translation of Accelerate's FSDP plugin and of transformers' `DistributedConfig` to shardwise's settings. Accelerate
also makes such a plugin from its configuration file, and transformers from TrainingArguments.fsdp and .fsdp_config."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import accelerators
from shardwise.engine.setup.planners import TRANSFORMERS
from shardwise.errors import ConfigError, UsageError
from shardwise.foreign.fsdp import read_fsdp
from shardwise.foreign.settings import ForeignSettings
from shardwise.foreign.transformers_sharding import read_distributed
from shardwise.fsdp.strategy import Precision
from shardwise.model_tools.classes import classes_named
from shardwise.policy.offload import ALL_ON_HOST, Offload

_PLUGIN = "fsdp_plugin"


def settings_of(plugin: Any) -> ForeignSettings:
    """Translate a plugin of either FSDP version, except for its dtypes, policies and modules.

    Raises ConfigError for an unknown sharding strategy.
    """
    classes = plugin.transformer_cls_names_to_wrap
    values = {
        "version": plugin.fsdp_version,
        "sharding_strategy": plugin.sharding_strategy,
        "reshard_after_forward": plugin.reshard_after_forward,
        "transformer_layer_cls_to_wrap": list(classes) if classes else None,
        "min_num_params": plugin.min_num_params,
        "activation_checkpointing": plugin.activation_checkpointing,
    }
    return read_fsdp({key: value for key, value in values.items() if value is not None}, _PLUGIN)


def arguments_of(config: Any) -> dict[str, Any]:
    """Return `sw.shard`'s arguments for transformers' `DistributedConfig`. Every rank must call this.

    Raises ConfigError for another number of ranks, for other kinds of parallelism, and for an `fsdp_plan`.
    """
    settings = read_distributed(config.to_dict(), "DistributedConfig")
    if settings.without_equal:
        raise ConfigError(f"DistributedConfig: shardwise has no counterpart for {settings.without_equal[0]}")
    if settings.get("parallel.tp") is not None:
        raise ConfigError(
            f"DistributedConfig: tp_size = {config.tp_size}: this trainer gives each rank its own batches, and ranks "
            "that share matrix products need the same ones: use `shardwise train` with parallel.tp, or a script with "
            f'sw.shard(model, mesh=sw.mesh(tp={config.tp_size}), tp_plan="auto")'
        )
    if settings.get("parallel.ep") is not None:
        raise ConfigError(
            f"DistributedConfig: ep_size = {config.ep_size}: not supported by this trainer: use `shardwise train` with "
            f"parallel.ep, or a script with sw.shard(model, mesh=sw.mesh(ep={config.ep_size}))"
        )
    if config.fsdp_plan:
        raise ConfigError("DistributedConfig: set fsdp_plan on the model instead (model.fsdp_plan = {...})")
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if settings.ranks != ranks:
        raise ConfigError(
            f"DistributedConfig: fsdp_size x dp_replicate_size is {settings.ranks}, but the number of ranks is {ranks}"
        )
    strategy, mesh = settings.get("parallel.strategy"), None
    if strategy == "hybrid_shard":
        kind = accelerators.accelerator()
        shape = (config.dp_replicate_size, config.fsdp_size)
        mesh = init_device_mesh("cpu" if kind is None else kind.type, shape, mesh_dim_names=("replicate", "shard"))
    return {
        "strategy": strategy,
        "mesh": mesh,
        "units": TRANSFORMERS,
        "precision": Precision(param="bf16", reduce="fp32") if config.fsdp_mixed_precision else None,
        "offload": ALL_ON_HOST if config.fsdp_cpu_offload else None,
    }


def units_in(model: nn.Module, units: Any) -> Any:
    """Return units as `sw.shard` takes them: classes of the model for a list of their names, other units as they are.
    Raises ConfigError for a name that no module's class has."""
    named = isinstance(units, list) and units and all(isinstance(name, str) for name in units)
    return classes_named(model, units, "units (transformer_layer_cls_to_wrap)") if named else units


def precision_of(plugin: Any) -> Precision | None:
    """Return the dtypes of the plugin's mixed precision policy; None without one."""
    policy = plugin.mixed_precision_policy
    if policy is None:
        return None
    return Precision(
        param=policy.param_dtype,
        reduce=policy.reduce_dtype,
        output=getattr(policy, "output_dtype", None),
        buffers=getattr(policy, "buffer_dtype", None),
        cast_inputs=getattr(policy, "cast_forward_inputs", True),
    )


def offload_of(plugin: Any) -> Offload | None:
    """Return the offload to host memory if the plugin asks for CPU offload, else None."""
    asked = plugin.cpu_offload  # a bool, FSDP1's CPUOffload, or FSDP2's OffloadPolicy or its subclass CPUOffloadPolicy
    is_asked = asked is True or getattr(asked, "offload_params", False) or type(asked).__name__ == "CPUOffloadPolicy"
    return ALL_ON_HOST if is_asked else None


def ignored_in(model: nn.Module, asked: Iterable[nn.Module] | str | None) -> list[nn.Parameter]:
    """Return the parameters of ignored modules, given as modules or as a regular expression for their whole fqns."""
    if asked is None:
        return []
    if isinstance(asked, str):
        expression = re.compile(asked)
        asked = [module for fqn, module in model.named_modules() if expression.fullmatch(fqn)]
    return [parameter for module in asked for parameter in module.parameters()]


def check_honoured(plugin: Any) -> None:
    """Raise UsageError for settings that the engine cannot honour and that would change the results of a run."""
    if plugin.param_init_fn is not None and not plugin.sync_module_states:  # that makes one which initialises nothing
        raise UsageError(
            "fsdp_plugin: param_init_fn would not be called; give modules on the meta device a "
            "reset_parameters() method, or build the model on a real device"
        )
    if callable(plugin.auto_wrap_policy) and not (plugin.transformer_cls_names_to_wrap or plugin.min_num_params):
        name = getattr(plugin.auto_wrap_policy, "__name__", "")
        if name not in {"transformer_auto_wrap_policy", "size_based_auto_wrap_policy"}:
            raise UsageError(
                "fsdp_plugin: an auto_wrap_policy of your own cannot be translated; use "
                "ShardwisePlugin(units=...) with a callable (fqn, module) -> bool"
            )

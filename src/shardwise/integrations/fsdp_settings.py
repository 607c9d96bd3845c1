"""What an FSDP plugin of Accelerate's asks for, in our words. Accelerate makes one from its configuration file too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from shardwise.errors import UsageError
from shardwise.policy.precision import Precision

_STRATEGIES = {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"}


def strategy_of(plugin: Any) -> str:
    """The strategy that a plugin of either FSDP version names. Raises UsageError if we have no such strategy."""
    asked = plugin.reshard_after_forward if plugin.reshard_after_forward is not None else plugin.sharding_strategy
    if plugin.fsdp_version == 1 and plugin.sharding_strategy is not None:
        asked = plugin.sharding_strategy
    if isinstance(asked, bool):
        return "full_shard" if asked else "shard_grad_op"
    name = str(getattr(asked, "name", asked)).upper().removeprefix("_")
    if name not in _STRATEGIES:
        raise UsageError(f"fsdp_plugin: {asked!r} is none of the sharding strategies {', '.join(sorted(_STRATEGIES))}")
    return name.lower()


def units_of(plugin: Any) -> Callable[[str, nn.Module], bool] | int | None:
    """Which modules the plugin would wrap: those of the named classes, those of a size, or None for automatic units."""
    if plugin.transformer_cls_names_to_wrap:
        names = frozenset(plugin.transformer_cls_names_to_wrap)
        return lambda fqn, module: type(module).__name__ in names
    return int(plugin.min_num_params) if plugin.min_num_params else None


def precision_of(plugin: Any) -> Precision | None:
    """The dtypes of the plugin's mixed precision policy; None without one."""
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


def ignored_in(model: nn.Module, asked: Iterable[nn.Module] | str | None) -> list[nn.Parameter]:
    """Parameters of the modules that the plugin leaves alone: given themselves, or as an expression for whole names."""
    if asked is None:
        return []
    if isinstance(asked, str):
        expression = re.compile(asked)
        asked = [module for fqn, module in model.named_modules() if expression.fullmatch(fqn)]
    return [parameter for module in asked for parameter in module.parameters()]


def check_honoured(plugin: Any) -> None:
    """Raise UsageError for what the engine does not have and a run would miss."""
    asked = plugin.cpu_offload  # a bool, FSDP1's CPUOffload, or FSDP2's OffloadPolicy or its subclass CPUOffloadPolicy
    if asked is True or getattr(asked, "offload_params", False) or type(asked).__name__ == "CPUOffloadPolicy":
        raise UsageError("fsdp_plugin: cpu_offload is not there yet; leave it out")
    if callable(plugin.auto_wrap_policy) and not (plugin.transformer_cls_names_to_wrap or plugin.min_num_params):
        name = getattr(plugin.auto_wrap_policy, "__name__", "")
        if name not in {"transformer_auto_wrap_policy", "size_based_auto_wrap_policy"}:
            raise UsageError(
                "fsdp_plugin: an auto_wrap_policy of your own cannot be translated; pass "
                "ShardwisePlugin(units=...) with a callable (fqn, module) -> bool"
            )

"""FSDP1's optimizer state dicts by fully qualified names, full or of `ShardedParameter`s: saving and loading."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullOptimStateDictConfig, OptimStateKeyType, StateDictType
from torch.optim import Optimizer

from shardwise.checkpoint.names.wrappers import unwrapped_name
from shardwise.compat.fsdp1.settings import settings_of
from shardwise.compat.state_dict import StateDictOptions, get_optimizer_state_dict, loadable_state_dict
from shardwise.errors import UsageError


def full(model: nn.Module, optimizer: Optimizer, rank0_only: bool, on_cpu: bool) -> dict[str, Any]:
    """Return full state by names; with `rank0_only` an empty dict on other ranks. Every rank must call this."""
    alone = rank0_only and on_cpu
    options = StateDictOptions(full_state_dict=True, cpu_offload=alone)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    if rank0_only and dist.is_initialized() and dist.get_rank() != 0:
        return {}
    return _on_cpu(state) if on_cpu else state


def as_set(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return optimizer state in the form of the model's settings. Every rank must call this."""
    settings = settings_of(model)
    config = settings.optim_state_dict_config
    if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
        assert isinstance(config, FullOptimStateDictConfig)
        return full(model, optimizer, config.rank0_only, config.offload_to_cpu)
    return get_optimizer_state_dict(model, optimizer)


def to_load(model: nn.Module, optimizer: Optimizer, state: dict[str, Any] | None, from_rank0: bool) -> dict[str, Any]:
    """Return what `optimizer.load_state_dict` takes: this rank's pieces by position.

    Every rank must call this with `from_rank0`.
    """
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0 and dist.is_initialized())
    return loadable_state_dict(model, optimizer, state or {}, options)


def is_first_alone(model: nn.Module) -> bool:
    """Whether the model's settings give full optimizer state to rank 0 only."""
    config = settings_of(model).optim_state_dict_config
    return isinstance(config, FullOptimStateDictConfig) and config.rank0_only


def rekeyed(
    state: dict[str, Any], kind: OptimStateKeyType, model: nn.Module, optimizer: Optimizer | None
) -> dict[str, Any]:
    """Return a full state dict keyed by names or by numbers, as asked. Does not communicate."""
    if optimizer is None:
        order = [unwrapped_name(name) for name, _ in model.named_parameters()]
    else:
        names = {id(parameter): unwrapped_name(name) for name, parameter in model.named_parameters()}
        order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    keys: dict[Any, Any] = dict(enumerate(order)) if kind is OptimStateKeyType.PARAM_NAME else {}
    keys = keys or {name: number for number, name in enumerate(order)}
    try:
        groups = [{**group, "params": [keys[key] for key in group["params"]]} for group in state["param_groups"]]
        return {"state": {keys[key]: values for key, values in state["state"].items()}, "param_groups": groups}
    except KeyError as error:
        raise UsageError(f"rekey_optim_state_dict: {error} is not one of the model's parameters in {kind}") from None


def _on_cpu(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _on_cpu(inner) for key, inner in value.items()}
    return value.cpu() if isinstance(value, Tensor) else value

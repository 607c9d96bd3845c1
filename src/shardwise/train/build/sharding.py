"""`[parallel]` and `train.compile`: from a model to a sharded and compiled one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.model_tools.classes import classes_named
from shardwise.modules.adapters import wrapped_by
from shardwise.policy.settings import SHARD
from shardwise.train.config.schema import HYBRID_STRATEGIES, LoraConfig, OffloadConfig, ParallelConfig
from shardwise.train.process.ranks import Ranks


def shard_model(
    model: nn.Module,
    config: ParallelConfig,
    ranks: Ranks,
    offload: OffloadConfig | None = None,
    lora: LoraConfig | None = None,
    align: int | None = None,
) -> nn.Module:
    """Shard a model in place as `[parallel]`, `[offload]` and `lora.base` say, with the alignment that the optimizer
    needs. Every rank must call this.

    Raises:
        ConfigError: `parallel.units` names a class that the model does not contain; or `parallel.tp` is more than 1 and
            the model has no tensor-parallel plan.
    """
    if config.tp > 1 and not getattr(model, "tp_plan", None):
        raise ConfigError(
            f"parallel.tp={config.tp}: {type(model).__name__} has no tensor-parallel plan, which a model of your own "
            "states as a dict of torch's ParallelStyles by names of modules in its attribute tp_plan: leave tp out"
        )
    if config.cp > 1 and not hasattr(model, "set_attn_implementation"):
        raise ConfigError(
            f"parallel.cp={config.cp}: {type(model).__name__} is not a transformers model, whose attention can be told "
            "of slices of sequences: leave cp out"
        )
    arguments = {name: getattr(config, one.key.partition(".")[2]) for name, one in SHARD.items() if one.key}
    arguments |= {
        "mesh": _mesh(config, ranks),
        "units": _units(model, config.units),
        "precision": precision_of(config, lora),
        "offload": _offload(offload),
        "align": align,
        "tp_plan": "auto" if config.tp > 1 else None,
    }
    return sw.shard(model, **arguments)


def precision_of(config: ParallelConfig, lora: LoraConfig | None = None) -> sw.Precision:
    """Return the dtypes that `[parallel]` and `lora.base` name."""
    frozen = None if lora is None else lora.base
    return sw.Precision(param=config.param_dtype, reduce=config.reduce_dtype, frozen=frozen)


def _offload(config: OffloadConfig | None) -> sw.Offload | None:
    places = None if config is None else config.places
    return None if config is None or places is None else sw.Offload(path=config.path, **asdict(places))


def needs_loss_scaling(config: ParallelConfig) -> bool:
    """Return whether gradients are computed in fp16, where small ones underflow unless the loss is scaled up."""
    return config.param_dtype == "fp16"


def compile_blocks(model: nn.Module) -> int:
    """Compile every repeated block in place; torch compiles the first of a kind and reuses the code for the others.

    Blocks are compiled one by one, because a sharded model gathers and frees parameters between blocks, where a graph
    of the whole model would have to break anyway. Inside a block, layers that are cut over a tensor axis are called
    outside of the graphs, because torch cannot trace their DTensors, whose memory comes and goes. Not collective. Call
    it after `sw.shard`.

    Returns:
        The number of blocks.
    """
    found = list(blocks(model))
    for block in found:
        for module in block.modules():
            if _is_cut(module) or _is_cut(wrapped_by(module)):
                module._compiled_call_impl = torch.compiler.disable(module._call_impl)  # as `compile`, with its hooks
        block.compile()
    return len(found)


def _is_cut(module: nn.Module | None) -> bool:
    """Whether the module itself holds parameters that are DTensors."""
    own: Iterable[object] = () if module is None else module._parameters.values()
    return any(isinstance(each, ShardedParameter) and each.placement.part is not None for each in own)


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost repeated blocks: the members of each ModuleList that is not inside another one."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from blocks(child)


def _mesh(config: ParallelConfig, ranks: Ranks) -> DeviceMesh | None:
    """Return a mesh if a shard group or another axis is configured; None leaves it to the strategy. Every
    rank must call this."""
    is_hybrid, group = config.strategy in HYBRID_STRATEGIES, config.shard_group
    if ranks.world_size == 1 or not (config.ranks_per_batch > 1 or config.ep > 1 or (is_hybrid and group)):
        return None
    group = group or max(1, ranks.per_host // config.ranks_per_batch)
    copies = config.data_ranks(ranks.world_size) // group if is_hybrid else 1
    return sw.mesh(copies, cp=config.cp, tp=config.tp, ep=config.ep)


def _units(model: nn.Module, units: int | Sequence[str] | None) -> int | set[type[nn.Module]] | None:
    """Translate class names, which are all that TOML can hold, to the model's classes."""
    if units is None or isinstance(units, int):
        return units
    return classes_named(model, units, "parallel.units")

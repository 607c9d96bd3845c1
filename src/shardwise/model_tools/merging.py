"""Merging PEFT adapters into the weights that they adapt, shard by shard."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.engine.lookup import require_engine
from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.modules.adapters import is_of_parameter, layers_of, low_rank, only_adapter, saved_by, wrapped_by
from shardwise.sharded.extensions.few_bits import FewBitsParameter


@torch.no_grad()
def merge_adapter(model: nn.Module) -> None:
    """Add a sharded model's LoRA adapter to its weights and remove PEFT's layers. The model is then as it was before
    PEFT, and must not be trained further. A module that the adapter trains as a whole (`modules_to_save`) takes the
    place of the base's. Collective: every rank must call this.

    Each rank adds to its own shards. Only the two factors of one layer at a time are gathered. If a weight is kept in
    few bits, its factors stay on every rank and are added in full precision whenever the weight is read.

    Raises UsageError for adapters other than plain LoRA, before anything is changed.
    """
    adapter = only_adapter(model)
    layers = layers_of(model)
    for name, layer in layers.items():
        if saved_by(layer, adapter) is None:
            _check_plain(name, layer, adapter)
    require_engine(model).reshard_all()
    for name, layer in layers.items():
        trained = saved_by(layer, adapter)
        if trained is None:
            _merge(layer, adapter)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, trained or wrapped_by(layer))


def _check_plain(name: str, layer: Any, adapter: str) -> None:
    plain = adapter in getattr(layer, "lora_A", {}) and adapter not in layer.lora_variant
    if not plain or layer.lora_bias[adapter] or is_of_parameter(layer):
        raise UsageError(f"{name}: adapters other than plain LoRA cannot be merged into shards: save them with PEFT")


def _merge(layer: Any, adapter: str) -> None:
    left, right = (_whole(layer.lora_B[adapter].weight), _whole(layer.lora_A[adapter].weight))
    if getattr(layer, "fan_in_fan_out", False):  # stored transposed, as in GPT-2
        left, right = right.T, left.T
    weight = layer.get_base_layer().weight
    if isinstance(weight, ShardedParameter) and weight.placement.part is not None:
        rows, columns = weight.placement.part
        left, right = _cut(left, 0, rows), _cut(right, 1, columns)
    added = partial(low_rank, left, right, layer.scaling[adapter])
    if isinstance(weight, FewBitsParameter):  # rounding the sum to few bits would lose the adapter
        weight.merge(added)
    elif isinstance(weight, ShardedParameter):
        piece = weight.fragment
        weight.local.add_(added(piece.start, piece.stop) if piece.numel else 0)  # a write on every rank
    else:
        weight.view(-1).add_(added(0, weight.numel()))


def _cut(tensor: torch.Tensor, dim: int, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in ranges], dim)


def _whole(parameter: Any) -> torch.Tensor:
    whole: torch.Tensor = parameter.full_tensor() if isinstance(parameter, ShardedParameter) else parameter
    return whole

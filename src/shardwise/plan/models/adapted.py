"""A model with low-rank adapters, as the trainer's `[lora]` makes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from shardwise.errors import PlanError, one_line
from shardwise.policy.adapters import Adapters
from shardwise.policy.precision import dtype_name

Builder = Callable[[], nn.Module]


@lru_cache(maxsize=8)  # one function for one model, so that caches keyed by builders hit
def with_adapters(builder: Builder, adapters: Adapters | None, computed: str) -> Builder:
    """Return a builder of the same model, frozen, with PEFT's adapters in fp32; the builder itself without adapters.

    Args:
        builder: builds the model, on the meta device.
        adapters: the adapters' settings; None for no adapters.
        computed: short name of the dtype in which the model computes.

    Raises:
        PlanError: PEFT is not installed; or, when the builder is called, PEFT has no adapters for the model.
    """
    if adapters is None:
        return builder
    rank, base = adapters.r, getattr(torch, dtype_name(adapters.dtype or computed, "lora.dtype"))
    if find_spec("peft") is None:
        raise PlanError(f"lora={rank} needs PEFT, which is not installed: pip install peft")

    def build() -> nn.Module:
        import peft

        model: Any = builder()
        for name, parameter in [*model.named_parameters()]:  # fake tensors cannot be converted in place
            if parameter.is_floating_point():
                module, _, own = name.rpartition(".")
                kept = nn.Parameter(parameter.to(base), requires_grad=False)
                setattr(model.get_submodule(module), own, kept)
        if hasattr(model, "tie_weights"):
            model.tie_weights()
        config = peft.LoraConfig(
            r=rank,
            lora_dropout=adapters.dropout,
            target_modules="all-linear" if adapters.targets is None else [*adapters.targets],
            task_type="CAUSAL_LM",
        )
        try:
            adapted: nn.Module = peft.inject_adapter_in_model(config, model)
        except ValueError as error:
            raise PlanError(f"lora={rank}: PEFT cannot add adapters: {one_line(error)}") from error
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return adapted

    return build

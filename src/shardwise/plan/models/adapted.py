"""A model with adapters of low rank, as `[lora]` of the trainer makes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from shardwise.errors import PlanError, one_line

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Builder = Callable[[], nn.Module]


@lru_cache(maxsize=8)  # the same function for the same model: what is known of one builder's models is of the other's
def with_adapters(builder: Builder, rank: int, base: str) -> Builder:
    """A builder of the same model, frozen, with PEFT's adapters in fp32; without a rank the builder itself.

    Args:
        builder: builds the model, on the meta device.
        rank: of the adapters beside all linear layers but the head; 0 = none.
        base: short name of the dtype that the frozen model is kept in.

    Raises:
        PlanError: PEFT is not installed; when called, it has no adapters for the model.
    """
    if not rank:
        return builder
    if find_spec("peft") is None:
        raise PlanError(f"lora={rank} needs PEFT, which is not installed: pip install peft")

    def build() -> nn.Module:
        import peft

        model: Any = builder()
        for name, parameter in [*model.named_parameters()]:  # fake tensors cannot be converted in place
            if parameter.is_floating_point():
                module, _, own = name.rpartition(".")
                kept = nn.Parameter(parameter.to(_DTYPES[base]), requires_grad=False)
                setattr(model.get_submodule(module), own, kept)
        if hasattr(model, "tie_weights"):
            model.tie_weights()
        config = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
        try:
            adapted: nn.Module = peft.inject_adapter_in_model(config, model)
        except ValueError as error:
            raise PlanError(f"lora={rank}: PEFT cannot put adapters in: {one_line(error)}") from error
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return adapted

    return build

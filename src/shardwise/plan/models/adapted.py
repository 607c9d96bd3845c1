"""A model with low-rank adapters, as the trainer's `[lora]` makes it with PEFT. For linear layers that no tensor axis
cuts, plans have adapters of their own, so that they need no PEFT."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import PlanError, one_line
from shardwise.fsdp.strategy import dtype_name
from shardwise.policy.adapters import Adapters
from shardwise.suggest import did_you_mean

Builder = Callable[[], nn.Module]


@lru_cache(maxsize=8)  # one function for one model, so that caches keyed by builders hit
def with_adapters(builder: Builder, adapters: Adapters | None, computed: str, tp: int = 1) -> Builder:
    """Return a builder of the same model, frozen, with adapters in fp32; the builder itself without adapters.

    Args:
        builder: builds the model, on the meta device.
        adapters: the adapters' settings; None for no adapters.
        computed: short name of the dtype in which the model computes.
        tp: the number of ranks that will cut the model.

    Raises:
        PlanError: when the builder is called: the model lacks a target, or PEFT, which adapters of embeddings,
            convolutions, stacked experts and models that are cut need, is not installed or has none for a target.
    """
    if adapters is None:
        return builder
    base = getattr(torch, dtype_name(adapters.dtype or computed, "lora.dtype"))

    def build() -> nn.Module:
        model: Any = builder()
        for name, parameter in [*model.named_parameters()]:  # fake tensors cannot be converted in place
            if parameter.is_floating_point():
                module, _, own = name.rpartition(".")
                kept = nn.Parameter(parameter.to(base), requires_grad=False)
                setattr(model.get_submodule(module), own, kept)
        if hasattr(model, "tie_weights"):
            model.tie_weights()
        layers = _targets(model, adapters)
        other = next((f"{name} ({type(one).__name__})" for name, one in layers.items() if not _is_linear(one)), None)
        if other is None and any(parameter.ndim == _STACK_NDIM for parameter in model.parameters()):
            other = "stacked experts"
        if tp > 1:
            other = f"a model that tp={tp} cuts"
        if other is not None:
            return _with_peft(model, adapters, other)
        for name, layer in layers.items():
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, _Adapted(layer, adapters))
        return model  # type: ignore[no-any-return]

    return build


_STACK_NDIM = 3


def _targets(model: nn.Module, adapters: Adapters) -> dict[str, nn.Module]:
    """Return the modules that get adapters, by name, as PEFT chooses them. Raises PlanError if a target is missing."""
    modules = dict(model.named_modules())
    if adapters.targets is None:
        getter: Any = getattr(model, "get_output_embeddings", None)
        head = getter() if callable(getter) else None
        return {name: layer for name, layer in modules.items() if _is_linear(layer) and layer is not head}
    for target in adapters.targets:
        if not any(f".{name}".endswith(f".{target}") for name in modules):
            leaves = {name.rpartition(".")[2] for name, layer in modules.items() if not [*layer.children()]} - {""}
            hint = did_you_mean(target, leaves) or f"; its modules are {', '.join(sorted(leaves))}"
            raise PlanError(f"lora.targets: the model has no module {target!r}{hint}")
    ends = tuple(f".{target}" for target in adapters.targets)
    return {name: layer for name, layer in modules.items() if f".{name}".endswith(ends)}


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"  # of GPT-2


def _with_peft(model: nn.Module, adapters: Adapters, what: str) -> nn.Module:
    """Return a frozen model with PEFT's own adapters, which some layers need. Raises PlanError."""
    if find_spec("peft") is None:
        raise PlanError(
            f"lora={adapters.r}: adapters of {what} need PEFT, which is not installed: pip install 'shardwise[peft]'"
        )
    import peft

    config = peft.LoraConfig(
        r=adapters.r,
        lora_dropout=adapters.dropout,
        target_modules="all-linear" if adapters.targets is None else [*adapters.targets],
        task_type="CAUSAL_LM",
    )
    try:
        adapted: nn.Module = peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        raise PlanError(f"lora={adapters.r}: PEFT cannot add adapters: {one_line(error)}") from error
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted


class _Adapted(nn.Module):
    """A linear layer with an adapter, with the operations, and names, of PEFT's `lora.Linear`."""

    def __init__(self, layer: nn.Module, adapters: Adapters) -> None:
        super().__init__()
        rows, columns = layer.weight.shape  # type: ignore[misc]
        self.out_features, self.in_features = (rows, columns) if isinstance(layer, nn.Linear) else (columns, rows)
        self.base_layer: Any = layer
        self.lora_dropout = nn.ModuleDict(
            {"default": nn.Dropout(adapters.dropout) if adapters.dropout else nn.Identity()}
        )
        self.lora_A = nn.ModuleDict(
            {"default": nn.Linear(self.in_features, adapters.r, bias=False, dtype=torch.float32)}
        )
        self.lora_B = nn.ModuleDict(
            {"default": nn.Linear(adapters.r, self.out_features, bias=False, dtype=torch.float32)}
        )
        self.scaling = 2.0

    @property
    def weight(self) -> Tensor:
        """The layer's own, which models may read."""
        return self.base_layer.weight  # type: ignore[no-any-return]

    @property
    def bias(self) -> Tensor | None:
        """The layer's own."""
        return self.base_layer.bias  # type: ignore[no-any-return]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer and, beside it, the adapter."""
        result: Tensor = self.base_layer(x, *args, **kwargs)
        dtype = result.dtype
        down, up = self.lora_A["default"], self.lora_B["default"]
        x = x.to(down.weight.dtype)  # type: ignore[arg-type]
        result = result + up(down(self.lora_dropout["default"](x))) * self.scaling
        return result.to(dtype)

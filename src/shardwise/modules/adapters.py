"""What PEFT has put into a model: the names that the model's tensors had before, and those that PEFT's files give
adapters. PEFT is not imported: whoever has such a model has done that."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from shardwise.errors import UsageError
from shardwise.sharded.parameter import ShardedParameter

Value = TypeVar("Value")

FILE_PREFIX = "base_model.model."
"""Of every name in PEFT's files: those of a PeftModel."""


def is_adapted(model: nn.Module) -> bool:
    """Whether there are adapters in a model."""
    return next(_wrapped(model), None) is not None


def base_of(model: nn.Module) -> nn.Module:
    """The model that a PeftModel is around; any other model itself."""
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    base: nn.Module = model.get_base_model()
    return base


def base_names(model: nn.Module, values: Mapping[str, Value]) -> dict[str, Value]:
    """What belongs to the base, under the names that it had before there were adapters; what belongs to adapters is
    left out. Of a model without adapters everything as it is.

    Args:
        values: by names of the model's tensors.
    """
    prefix = next((f"{name}." for name, module in model.named_modules() if name and module is base_of(model)), "")
    wrapped = dict(_wrapped(model))
    found = {}
    for name, value in values.items():
        bare: str | None = name
        for around in reversed([place for place in _places_above(name) if place in wrapped]):
            bare = _without(bare, around, wrapped[around])
        if bare is not None:
            found[bare.removeprefix(prefix)] = value
    return found


def _without(name: str | None, around: str, inner: str) -> str | None:
    """A tensor's name without that for what is inside the module `around`; None if it does not lie in there."""
    start = f"{around}.{inner}."
    return None if name is None or not name.startswith(start) else f"{around}.{name.removeprefix(start)}"


def base_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The base's modules under the names that they had before there were adapters, one that has several under each."""
    named = {f"{name}.": module for name, module in model.named_modules(remove_duplicate=False)}
    return {name.removesuffix("."): module for name, module in base_names(model, named).items()}


def adapter_names(model: nn.Module) -> dict[str, str]:
    """By the names that the model's state_dict has for the tensors of its adapter, those that PEFT's files have.

    Raises UsageError where there is not exactly one adapter.
    """
    import peft

    adapter = only_adapter(model)
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    kept = peft.get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter, save_embedding_layers=False)
    by_value = {id(value): name.removeprefix(FILE_PREFIX) for name, value in kept.items()}
    return {name: f"{FILE_PREFIX}{by_value[id(value)]}" for name, value in state.items() if id(value) in by_value}


def adapter_config(model: nn.Module) -> Any:
    """PEFT's configuration of the model's adapter. Raises UsageError where there is not exactly one."""
    return _configs(model)[only_adapter(model)]


def only_adapter(model: nn.Module) -> str:
    """The name of the model's adapter. Raises UsageError where there is not exactly one."""
    names = list(_configs(model))
    if len(names) != 1:
        raise UsageError(f"{type(model).__name__} has {len(names)} adapters of PEFT ({', '.join(names)}), not one")
    return names[0]


def low_rank(left: Tensor, right: Tensor, scale: float, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of `scale * left @ right`, flattened: 1-D, in the factors' dtype. Only rows that these lie
    in are computed.

    Args:
        left: [rows, r].
        right: [r, columns].
    """
    columns = right.shape[1]
    first, last = start // columns, -(-stop // columns)
    rows = (left[first:last] @ right) * scale
    return rows.flatten()[start - first * columns : stop - first * columns]


def _configs(model: nn.Module) -> Mapping[str, Any]:
    """By adapter: of the model, or of the one inside it that has some."""
    return next((found for module in model.modules() if (found := module.__dict__.get("peft_config"))), {})


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """PEFT's modules around the model's own, by name, from the outside in."""
    return {name: model.get_submodule(name) for name, _ in _wrapped(model)}


def wrapped_by(layer: nn.Module) -> nn.Module | None:
    """The model's own module inside one of PEFT's; None for any other module."""
    found = next(_wrapped(layer), None)
    return layer.get_submodule(found[1]) if found is not None and not found[0] else None


def is_of_parameter(module: nn.Module) -> bool:
    """Whether a module is PEFT's around one that has a parameter of its own adapted (`target_parameters`), whatever
    that does with it: each forward exchanges the parameter for the adapted one."""
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.tuners.lora.layer.ParamWrapper)


def watch_layers(model: nn.Module, is_computing: Callable[[], bool]) -> None:
    """Have PEFT's layers do right by parameters that are gathered.

    They raise where they would merge or unmerge while `is_computing`: they write through `weight.data`, which
    autograd's version counters do not see; a merged adapter's layer that is called with adapters off does so in its
    forward. And where one exchanges a parameter for an adapted one, that is not counted as a write.
    """
    for name, _ in _wrapped(model):
        layer: Any = model.get_submodule(name)
        for method in ("merge", "unmerge"):
            if callable(getattr(type(layer), method, None)):
                layer.__dict__[method] = _unless(is_computing, layer, method, name)
        if is_of_parameter(layer):
            layer.__dict__["_activate_lora"] = _exchanging(layer, name)


def _exchanging(layer: Any, name: str) -> Callable[..., Any]:
    """The layer's own context in which its parameter is adapted. `torch.nn.utils.parametrize` begins it with
    `parameter.set_(parameter)`, which writes no number and counts as a write."""

    @contextmanager
    def exchanged(adapters: list[str]) -> Iterator[None]:
        parameter = layer.get_param()
        if isinstance(parameter, ShardedParameter):
            raise UsageError(
                f"PEFT's layer {name!r} adapts parameter {parameter.fqn!r} of a module that is a unit of its own, so "
                "that it is not gathered yet: make the layer around it the unit, or none of both"
            )
        with ExitStack() as stack:
            with _unsafe_preserve_version_counter(parameter):
                stack.enter_context(type(layer)._activate_lora(layer, adapters))
            yield

    return exchanged


def _unless(is_computing: Callable[[], bool], layer: nn.Module, method: str, name: str) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if is_computing():
            raise UsageError(
                f"PEFT's layer {name!r} would {method} its adapter inside a forward: into a gathered copy, so it would "
                f"be lost. Before that: `with sw.unsharded(model, writeback=True): model.{method}_adapter()`"
            )
        return getattr(type(layer), method)(layer, *args, **kwargs)

    return guarded


def reset(layer: nn.Module, model: nn.Module) -> None:
    """Give the adapters of one of PEFT's layers in a model their initial numbers again.

    Raises ValueError where these follow from the base's numbers, or PEFT does not say how.
    """
    again: Any = getattr(layer, "reset_lora_parameters", None)
    for name, config in _configs(model).items():
        how = getattr(config, "init_lora_weights", None)
        if again is None or how not in (True, "gaussian"):
            raise ValueError(f"{type(layer).__name__} with init_lora_weights={how!r}")
        again(name, how)


def _wrapped(model: nn.Module) -> Iterator[tuple[str, str]]:
    """PEFT's modules around the model's own, by name, each with its name for that."""
    peft: Any = sys.modules.get("peft")
    if peft is None:
        return
    kinds = {
        peft.tuners.tuners_utils.BaseTunerLayer: "base_layer",
        peft.utils.other.ModulesToSaveWrapper: "original_module",
    }
    for name, module in model.named_modules():
        for kind, inner in kinds.items():
            if isinstance(module, kind) and hasattr(module, inner):
                yield name, inner


def _places_above(name: str) -> Iterator[str]:
    """The names of the modules around a tensor."""
    parts = name.split(".")
    for stop in range(1, len(parts)):
        yield ".".join(parts[:stop])

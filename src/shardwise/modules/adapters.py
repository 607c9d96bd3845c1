"""PEFT adapters in a model: the names that the model's tensors had before PEFT, and the names of adapters in PEFT's
files. PEFT need not be installed: a model with adapters cannot exist unless its user has imported PEFT."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter

Value = TypeVar("Value")

FILE_PREFIX = "base_model.model."
"""Prefix of every name in PEFT's files, which use the names of a PeftModel."""


def base_of(model: nn.Module) -> nn.Module:
    """Return the model inside a PeftModel; any other model as it is."""
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    base: nn.Module = model.get_base_model()
    return base


def base_names(model: nn.Module, values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the values of the base's tensors under the names that these had before PEFT, without those of adapters. If
    the model has no adapters, returns all of them as they are.

    Args:
        values: anything, by the names of the model's tensors.
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
    """Return a tensor's name without the part `inner` after the module `around`; None if it is not inside `inner`."""
    start = f"{around}.{inner}."
    return None if name is None or not name.startswith(start) else f"{around}.{name.removeprefix(start)}"


def base_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the base's modules by the names that they had before PEFT; a module with several names is under each."""
    named = {f"{name}.": module for name, module in model.named_modules(remove_duplicate=False)}
    return {name.removesuffix("."): module for name, module in base_names(model, named).items()}


def adapter_names(model: nn.Module) -> dict[str, str]:
    """Return the names that PEFT's files use for the adapter's tensors, by their names in the model's state_dict.

    Raises UsageError unless the model has exactly one adapter.
    """
    import peft

    adapter = only_adapter(model)
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    with _as_if_whole(model):
        kept = peft.get_peft_model_state_dict(
            model, state_dict=state, adapter_name=adapter, save_embedding_layers=False
        )
    by_value = {id(value): name.removeprefix(FILE_PREFIX) for name, value in kept.items()}
    return {name: f"{FILE_PREFIX}{by_value[id(value)]}" for name, value in state.items() if id(value) in by_value}


@contextmanager
def _as_if_whole(model: nn.Module) -> Iterator[None]:
    """A context in which PEFT does not see that the model is tensor-parallel: it would gather what it is given."""
    base: Any = base_of(model)
    size = base.__dict__.pop("_tp_size", None)
    try:
        yield
    finally:
        if size is not None:
            base._tp_size = size


def adapter_config(model: nn.Module) -> Any:
    """Return PEFT's configuration of the model's adapter. Raises UsageError unless it has exactly one adapter."""
    return _configs(model)[only_adapter(model)]


def only_adapter(model: nn.Module) -> str:
    """Return the name of the model's adapter. Raises UsageError unless it has exactly one."""
    names = list(_configs(model))
    if len(names) != 1:
        raise UsageError(
            f"{type(model).__name__} has {len(names)} PEFT adapters ({', '.join(names)}); it must have exactly one"
        )
    return names[0]


def low_rank(left: Tensor, right: Tensor, scale: float, start: int, stop: int) -> Tensor:
    """Return elements [start, stop) of the flattened `scale * left @ right`: 1-D, in the factors' dtype. Computes only
    the rows that contain them.

    Args:
        left: [rows, r].
        right: [r, columns].
    """
    columns = right.shape[1]
    first, last = start // columns, -(-stop // columns)
    rows = (left[first:last] @ right) * scale
    return rows.flatten()[start - first * columns : stop - first * columns]


def _configs(model: nn.Module) -> Mapping[str, Any]:
    """Return PEFT's configurations by adapter name, from the model or the first module inside it that has some."""
    return next((found for module in model.modules() if (found := module.__dict__.get("peft_config"))), {})


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return PEFT's wrappers around modules of the model, by name; outer ones before inner ones."""
    return {name: model.get_submodule(name) for name, _ in _wrapped(model)}


def wrapped_by(layer: nn.Module) -> nn.Module | None:
    """Return the model's own module inside one of PEFT's wrappers; None for any other module."""
    found = next(_wrapped(layer), None)
    return layer.get_submodule(found[1]) if found is not None and not found[0] else None


def saved_by(layer: nn.Module, adapter: str) -> nn.Module | None:
    """Return the module that an adapter trains as a whole instead of the base's (`modules_to_save`), inside one of
    PEFT's wrappers; None for any other module."""
    return _saved(layer).get(adapter)


def saved_copies(layer: nn.Module) -> list[nn.Module]:
    """Return the modules of `saved_by`, of all adapters. PEFT makes them as copies of the base's."""
    return list(_saved(layer).values())


def _saved(layer: Any) -> Mapping[str, nn.Module]:
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(layer, peft.utils.other.ModulesToSaveWrapper):
        return {}
    return dict(layer.modules_to_save)


def is_of_parameter(module: nn.Module) -> bool:
    """Whether a module is PEFT's wrapper for a single parameter of a module (`target_parameters`): each forward
    replaces the parameter by the adapted one, whatever the inner module does with it."""
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.tuners.lora.layer.ParamWrapper)


def watch_layers(model: nn.Module, is_computing: Callable[[], bool]) -> None:
    """Patch PEFT's layers so that they are safe on gathered parameters.

    `merge` and `unmerge` raise while `is_computing`, because they write through `weight.data`, which autograd's version
    counters do not see. (A layer with a merged adapter unmerges in its forward if adapters are disabled then.) Where a
    layer replaces a parameter by the adapted one, the replacement is not counted as a write.
    """
    for name, _ in _wrapped(model):
        layer: Any = model.get_submodule(name)
        for method in ("merge", "unmerge"):
            if callable(getattr(type(layer), method, None)):
                layer.__dict__[method] = _unless(is_computing, layer, method, name)
        if is_of_parameter(layer):
            layer.__dict__["_activate_lora"] = _exchanging(layer, name)


def _exchanging(layer: Any, name: str) -> Callable[..., Any]:
    """Return a replacement for the layer's context manager in which its parameter is adapted.

    `torch.nn.utils.parametrize` begins it with `parameter.set_(parameter)`, which changes no value but increments the
    version counter; here the counter is preserved.
    """

    @contextmanager
    def exchanged(adapters: list[str]) -> Iterator[None]:
        parameter = layer.get_param()
        if isinstance(parameter, ShardedParameter):
            raise UsageError(
                f"PEFT's layer {name!r} adapts parameter {parameter.fqn!r} of a module that is a unit of its own, so "
                "the parameter is not gathered when the layer reads it: make the layer the unit instead, or neither"
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
                f"PEFT's layer {name!r} would {method} its adapter inside a forward, into a gathered copy, where it "
                "would be lost: before the forward, call `with sw.unsharded(model, writeback=True): "
                f"model.{method}_adapter()`"
            )
        return getattr(type(layer), method)(layer, *args, **kwargs)

    return guarded


def reset(layer: nn.Module, model: nn.Module) -> None:
    """Initialise the adapters of one of PEFT's layers in a model again.

    Raises ValueError if their initial values depend on the base's values, or if the layer has no method for it.
    """
    again: Any = getattr(layer, "reset_lora_parameters", None)
    for name, config in _configs(model).items():
        how = getattr(config, "init_lora_weights", None)
        if again is None or how not in (True, "gaussian"):
            raise ValueError(f"{type(layer).__name__} with init_lora_weights={how!r}")
        again(name, how)


def _wrapped(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of PEFT's wrappers around the model's modules, each with its attribute for the inner module."""
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
    """Yield the names of the modules around a tensor, outermost first."""
    parts = name.split(".")
    for stop in range(1, len(parts)):
        yield ".".join(parts[:stop])

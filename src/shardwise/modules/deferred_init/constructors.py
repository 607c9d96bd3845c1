"""How to call the constructor of an existing module again."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_MISSING = object()


def is_transformer(module: nn.Module) -> bool:
    """Whether the module is a model of transformers, which can be built again from its configuration."""
    own = all(hasattr(type(module), name) for name in ("_init_weights", "initialize_weights", "_from_config"))
    return own and hasattr(module, "config")  # PEFT's wrappers forward instance attributes to the model inside


def transformer_again(module: nn.Module) -> nn.Module:
    """Call a transformers model's constructor as `from_config` does.

    Uses the dtype in the configuration if the model has parameters of that dtype; otherwise the model was built in the
    default dtype, and perhaps cast afterwards.
    """
    config = copy.deepcopy(module.config)
    named = getattr(config, "dtype", None)
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    build: Any = type(module)
    built: nn.Module = build._from_config(config, dtype=named if named in dtypes else torch.get_default_dtype())
    return built


def plain_constructor(module: nn.Module) -> Callable[[], nn.Module] | None:
    """Return a call that builds another module of the same class, with the arguments that the module keeps as
    attributes of the same names. None for torch's own classes, or if an argument is missing or contains a module or
    tensor.

    The call raises ValueError if an attribute of the new module differs from the argument that it was given: then the
    attributes are not the arguments.
    """
    if is_torchs(type(module)):
        return None
    _, *parameters = inspect.signature(type(module).__init__).parameters.values()
    arguments: dict[str, Any] = {}
    for parameter in parameters:
        value = module.__dict__.get(parameter.name, _MISSING)
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if not named or value is _MISSING or any(isinstance(leaf, (nn.Module, Tensor)) for leaf in tree_leaves(value)):
            return None
        arguments[parameter.name] = value
    return partial(_construct, type(module), arguments)


def _construct(kind: type[nn.Module], arguments: dict[str, Any]) -> nn.Module:
    built = kind(**copy.deepcopy(arguments))
    for name, value in arguments.items():
        kept = built.__dict__.get(name, _MISSING)
        compares: object = type(value).__eq__  # without an __eq__ by value nothing can be checked
        if type(kept) is not type(value) or (compares is not object.__eq__ and kept != value):
            raise ValueError(f"{kind.__name__} was not built with {name}={value!r}")
    return built


def is_torchs(kind: type) -> bool:
    """Whether a class is defined in torch, or is a builtin."""
    return kind.__module__.partition(".")[0] in {"torch", "builtins"}

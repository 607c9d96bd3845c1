"""`module:function`: a model that user code builds."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise.errors import UserError, one_line
from shardwise.suggest import did_you_mean


def load_function(name: str, where: str, error: type[UserError], built: str) -> Callable[..., Any]:
    """Import the function that `module:function` names, also from the working directory.

    Args:
        name: "module:function".
        where: the beginning of messages: where the user wrote the name, and the name.
        error: raised if `name` is no function.
        built: what the function builds, for messages.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise error(f"{where} must have the form module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as cause:
        why = one_line(cause, with_type=not isinstance(cause, ImportError))
        raise error(f"{where}: {module_name} cannot be imported: {why}") from cause
    if not hasattr(module, function_name):
        raise error(f"{where}: {module_name} has no {function_name}{did_you_mean(function_name, vars(module))}")
    function: Any = getattr(module, function_name)
    if isinstance(function, nn.Module) or not callable(function):
        raise error(
            f"{where} is of type {type(function).__name__}, not a function: name a function that builds {built}"
        )
    return function  # type: ignore[no-any-return]


def load_factory(name: str, where: str, error: type[UserError]) -> Callable[[], nn.Module]:
    """Import a function that builds a model, as `load_function`, and return a function that calls it. Exceptions of the
    user's function reach the caller.

    Raises `error` also if the function cannot be called without arguments. The returned function raises it if the
    user's function does not return a module.
    """
    function = load_function(name, where, error, "the model")
    needed = _needed(function)
    if needed:
        raise error(
            f"{where} needs arguments ({', '.join(needed)}): name a function that needs none, such as one that calls it"
        )

    def build() -> nn.Module:
        model = function()
        if not isinstance(model, nn.Module):
            raise error(f"{where} returned a {type(model).__name__}, not a torch.nn.Module")
        return model

    return build


def _needed(function: Callable[..., Any]) -> list[str]:
    """Return the parameters without which a function cannot be called; none if it has no signature: then calling it
    raises."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in {p.VAR_POSITIONAL, p.VAR_KEYWORD}]

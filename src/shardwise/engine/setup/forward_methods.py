"""Methods besides `forward` that compute with a module's parameters: those that a user names, and `generate` of
transformers and PEFT models."""

from __future__ import annotations

import functools
import sys
from types import MethodType
from typing import Any

import torch
from torch import nn

from shardwise.engine.checked import CheckedEngine
from shardwise.engine.lookup import engines_of
from shardwise.engine.setup.generation import in_rounds
from shardwise.errors import UsageError
from shardwise.fsdp.unit import Unit

_REGISTERED = "_shardwise_forward_method"


def register_forward_method(module: nn.Module, name: str) -> None:
    """Make calls of `module.NAME(...)` gather parameters as calls of `module(...)` do. No communication.

    Such calls count as forwards: every rank must make the same ones, inputs and outputs are cast, gradients are
    reduced. Hooks that users put on the module's forward do not run. Inside a forward of the module's unit the method
    does what it did before. To register a method again does nothing.

    Args:
        module: a sharded model or a module inside one. If it is no unit, the unit around it is gathered.
        name: name of a method, such as "encode" or "generate".

    Raises:
        UsageError: the module is not sharded, or has no such method besides `forward`.
    """
    engines_of(module)
    method = getattr(module, name, None)
    if name in {"forward", "__call__"} or not callable(method) or isinstance(method, nn.Module):
        raise UsageError(f"sw.register_forward_method: {type(module).__name__} has no method {name!r} besides forward")
    if not hasattr(method, _REGISTERED):
        # A bound method, so that copy.deepcopy of the module binds it to the copy.
        setattr(module, name, MethodType(_as_forward(getattr(method, "__func__", None), name), module))


def register_generate(model: nn.Module) -> None:
    """Make `generate` of every transformers or PEFT model within `model` gather parameters. It computes outside any
    forward: it calls an encoder alone, embeds inputs, reads prompts of adapters.

    It runs under `no_grad`, and so counts as a forward without gradients, which is no part of a training step.
    """
    for module in model.modules():
        method = getattr(module, "generate", None) if _is_generating(module) else None
        if method is not None and not hasattr(method, _REGISTERED):
            generate = torch.no_grad()(_as_forward(_with_rounds(method.__func__), "generate"))
            module.__dict__["generate"] = MethodType(generate, module)


def _is_generating(module: nn.Module) -> bool:
    """Whether the module is such a model. Imports nothing: whoever has such a model has imported its library."""
    kinds = (("transformers.generation.utils", "GenerationMixin"), ("peft", "PeftModel"))
    kind = tuple(getattr(sys.modules[name], kind) for name, kind in kinds if name in sys.modules)
    return isinstance(module, kind) and callable(getattr(type(module), "generate", None))


def _with_rounds(generate: Any) -> Any:
    @functools.wraps(generate)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with in_rounds(module, engines_of(module)[0]):
            return generate(module, *args, **kwargs)

    return call


def _as_forward(function: Any, name: str) -> Any:
    if function is None:
        raise UsageError(f"sw.register_forward_method: {name!r} is not a Python method")

    @functools.wraps(function)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        engine, unit = _unit_around(module)
        if engine.is_suspended or unit.in_forward:
            return function(module, *args, **kwargs)
        args, kwargs = engine.pre_forward(unit, args, kwargs)
        output = None
        try:
            output = function(module, *args, **kwargs)
        finally:
            output = engine.post_forward(unit, output)
        return output

    call.__dict__[_REGISTERED] = True
    return call


def _unit_around(module: nn.Module) -> tuple[CheckedEngine, Unit]:
    """Return the module's engine, and the innermost unit that is the module or contains it."""
    engine = engines_of(module)[0]
    around = [unit for unit in engine.units if any(below is module for own in unit.modules for below in own.modules())]
    return engine, max(around, key=lambda unit: len(unit.ancestors), default=engine.root)

"""Parameters that are added to a model after it was sharded: nothing reduces their gradients, so every rank would train
its own copy. Looked for at every outermost forward with gradients enabled."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_

import torch
from torch import nn

from shardwise.engine.checked import CheckedEngine
from shardwise.errors import UsageError
from shardwise.fsdp.parameter_group import foreign_parameter
from shardwise.fsdp.sharded_parameter import ShardedParameter, sharded_of


class LateParameters:
    """Finds parameters added to one sharded model after `sw.shard`."""

    def __init__(self, model: nn.Module, ignored: Iterable[nn.Parameter]) -> None:
        """`model` has just been sharded; `ignored` are the parameters that were left out."""
        self._model = model
        self._ignored = list(ignored)
        self._modules: list[nn.Module] = []
        """The model's modules at the last check that passed; `_held` and `_frozen` are their contents and the plain
        frozen parameters then. While these are unchanged there is nothing to look for; comparing them takes 0.1 us for
        each module and parameter."""
        self._held: list[nn.Module | nn.Parameter | None] = []
        self._frozen: list[nn.Parameter] = []

    def check(self) -> None:
        """Raise UsageError, naming it, for a plain parameter that requires a gradient, in grad mode. Frozen ones may be
        added."""
        if not torch.is_grad_enabled() or self._is_unchanged():  # else a rank may be evaluating alone
            return
        modules = list(self._model.modules())
        plain = self._plain_parameters(modules)
        late = next((parameter for parameter in plain if parameter.requires_grad), None)
        if late is not None:
            fqn = next(fqn for fqn, parameter in self._model.named_parameters() if parameter is late)
            if torch.compiler.is_exporting():  # its stand-ins for our parameters are plain
                raise foreign_parameter(fqn, late)
            raise UsageError(
                f"parameter {fqn!r} was added to the model after sw.shard, so every rank would train its own: add or "
                "replace modules before sw.shard, change weights in place in sw.unsharded(model, writeback=True), or "
                "call requires_grad_(False) on parameters that are not to be trained"
            )
        self._modules, self._held, self._frozen = modules, _contents(modules), plain

    def _is_unchanged(self) -> bool:
        held = _contents(self._modules)
        return (
            bool(held)
            and len(held) == len(self._held)
            and all(map(is_, held, self._held))
            and not any(parameter.requires_grad for parameter in self._frozen)
        )

    def _plain_parameters(self, modules: Iterable[nn.Module]) -> list[nn.Parameter]:
        known = {id(parameter) for parameter in self._ignored}
        return [
            parameter
            for module in modules
            for parameter in module._parameters.values()
            if parameter is not None
            and not isinstance(parameter, ShardedParameter)
            and id(parameter) not in known
            and sharded_of(parameter) is None
        ]


def _contents(modules: Iterable[nn.Module]) -> list[nn.Module | nn.Parameter | None]:
    """Return the direct submodules and parameters of each module, module by module."""
    return [item for module in modules for table in (module._modules, module._parameters) for item in table.values()]


def attach(engine: CheckedEngine) -> None:
    """Called with each engine that has its units."""
    engine.hooks.begin_step.append(LateParameters(engine.model, engine.ignored).check)

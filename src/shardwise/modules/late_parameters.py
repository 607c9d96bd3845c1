"""Parameters that come into a model after it was sharded: nobody reduces their gradients, so every rank would train
its own.

Torch tells of every parameter and module that is registered anywhere; only then is a model looked through again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from shardwise.errors import UsageError
from shardwise.sharded.parameter import ShardedParameter


class _Registrations:
    """How many there have been, in all modules."""

    count = 0

    @classmethod
    def add(cls, module: nn.Module, name: str, value: Any) -> None:
        cls.count += 1


register_module_parameter_registration_hook(_Registrations.add)
register_module_module_registration_hook(_Registrations.add)


class Newcomers:
    """Those of one sharded model."""

    def __init__(self, model: nn.Module, ignored: Iterable[nn.Parameter]) -> None:
        """`model` has just been sharded, but for `ignored`."""
        self._model = model
        self.ignored = list(ignored)
        self._count = _Registrations.count
        """When the model was looked through last."""
        self._found: list[tuple[str, nn.Parameter]] = []

    def check(self) -> None:
        """Raise UsageError, with its name, for a plain parameter that wants a gradient. Frozen ones may come."""
        if self._count != _Registrations.count:
            known = {id(parameter) for parameter in self.ignored}
            self._found = [
                (fqn, parameter)
                for fqn, parameter in self._model.named_parameters()
                if not isinstance(parameter, ShardedParameter) and id(parameter) not in known
            ]
            self._count = _Registrations.count
        for fqn, parameter in self._found:
            if parameter.requires_grad:
                self._count = -1  # look again: it may be gone by then
                raise UsageError(
                    f"parameter {fqn!r} came into the model after sw.shard, so every rank would train its own: add or "
                    "replace modules before sw.shard, change weights in place in sw.unsharded(model, writeback=True), "
                    "or call requires_grad_(False) on what is not to be trained"
                )

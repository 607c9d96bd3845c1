"""Parameters that come into a model after it was sharded: nobody reduces their gradients, so every rank would train
its own. Looked for at every outermost forward that wants gradients: 0.3 us a module and parameter."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from shardwise.errors import UsageError
from shardwise.sharded.parameter import ShardedParameter, outer_face


class Newcomers:
    """Those of one sharded model."""

    def __init__(self, model: nn.Module, ignored: Iterable[nn.Parameter]) -> None:
        """`model` has just been sharded, but for `ignored`."""
        self._model = model
        self.ignored = list(ignored)
        self._known = {id(parameter) for parameter in self.ignored}

    def check(self) -> None:
        """Raise UsageError, with its name, for a plain parameter that wants a gradient. Frozen ones may come."""
        late = self._find()
        if late is not None:
            fqn = next(fqn for fqn, parameter in self._model.named_parameters() if parameter is late)
            raise UsageError(
                f"parameter {fqn!r} came into the model after sw.shard, so every rank would train its own: add or "
                "replace modules before sw.shard, change weights in place in sw.unsharded(model, writeback=True), "
                "or call requires_grad_(False) on what is not to be trained"
            )

    def _find(self) -> nn.Parameter | None:
        """`Module.named_parameters` would take ten times as long."""
        seen: set[nn.Module] = set()
        pending: list[nn.Module | None] = [self._model]
        while pending:
            module = pending.pop()
            if module is None or module in seen:
                continue
            seen.add(module)
            pending += module._modules.values()
            for parameter in module._parameters.values():
                if isinstance(parameter, ShardedParameter) or parameter is None or not parameter.requires_grad:
                    continue
                if id(parameter) not in self._known and outer_face(parameter) is None:
                    return parameter
        return None

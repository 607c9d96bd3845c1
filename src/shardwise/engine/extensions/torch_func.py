"""torch.func transforms around or inside a unit, whose saved tensors cannot be tracked then: errors that say so."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.engine.checked import CheckedEngine
from shardwise.errors import UsageError
from shardwise.fsdp.unit import Arguments, Unit

_autograd: Any = torch._C._autograd
_WAY_OUT = "Apply the torch.func transform outside the unit, in sw.unsharded(model)"


def _check(unit: Unit) -> None:
    """Raise UsageError if saved-tensor hooks are disabled, in grad mode."""
    if torch.is_grad_enabled() and not _autograd._saved_tensors_hooks_is_enabled():
        raise UsageError(
            "a sharded unit ran where saved-tensor hooks are disabled (torch.func.grad, vjp, jvp, vmap over "
            f"grad): its saved parameters could not be tracked. {_WAY_OUT}"
        )


def _explain(unit: Unit, module: nn.Module, given: Arguments, error: BaseException) -> None:
    """Add the way out to the error that torch raises when a transform inside a unit meets the hooks."""
    if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error) and not hasattr(error, "__notes__"):
        error.add_note(f"shardwise: {_WAY_OUT}")


def attach(engine: CheckedEngine) -> None:
    """Called with each engine that has its units."""
    engine.hooks.begin_forward.append(_check)
    engine.hooks.forward_raised.append(_explain)

"""Notes on torch's errors about mixed dtypes: weights, and inputs or buffers, of different dtypes."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.engine.checked import CheckedEngine
from shardwise.fsdp.unit import Arguments, Unit


def _explain(unit: Unit, module: nn.Module, given: Arguments, error: BaseException) -> None:
    """Add a note to the error that torch raises for mixed dtypes: the unit, the two dtypes and how to fix it. Any other
    error is left alone."""
    if not isinstance(error, RuntimeError) or "type" not in str(error) or hasattr(error, "__notes__"):
        return
    computes_in = unit.parameters.compute_dtypes
    weights = _names(dtype for dtype in computes_in if dtype.is_floating_point)
    others = _names(_foreign([leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)], computes_in))
    buffers = [name for name, buffer in module.named_buffers() if _foreign([buffer], computes_in)]
    if not weights or not (others or buffers):
        return
    if others:
        what = (
            f"was given {others}. precision.cast_inputs casts the inputs of the whole model, not what its modules pass "
            "to one another: cast this module's inputs to the dtype of its weights"
        )
    else:
        dtypes = _names(_foreign(module.buffers(), computes_in))
        what = f"holds buffer {buffers[0]!r} in {dtypes}: cast the buffers with precision=sw.Precision(buffers=...)"
    error.add_note(
        f"shardwise: {unit} computes in {weights} and {what}; or exclude the module with "
        "sw.shard(ignored=module.parameters()), or choose another precision.param"
    )


def _foreign(tensors: Iterable[Tensor], computes_in: Collection[torch.dtype]) -> set[torch.dtype]:
    """Return the tensors' floating-point dtypes that are not among the unit's."""
    return {t.dtype for t in tensors if t.is_floating_point() and t.dtype not in computes_in}


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def attach(engine: CheckedEngine) -> None:
    """Called with each engine that has its units."""
    engine.hooks.forward_raised.append(_explain)

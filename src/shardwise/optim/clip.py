"""Gradient clipping by the global norm, in one pass over this rank's pieces."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from shardwise.engine.extensions.backward_steps import BackwardSteps, steps_in_backward
from shardwise.errors import UsageError
from shardwise.fsdp.operations import global_norms
from shardwise.fsdp.sharded_parameter import ShardedParameter, sharded_of


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients in place so that their joint norm is at most `max_norm`. Every rank must call this.

    Uses the arithmetic of `torch.nn.utils.clip_grad_norm_`, so the bits are the same, except for the order in which
    norms of several shard groups are added. Costs one collective whatever the number of dtypes and a few operations for
    each dtype whatever the number of parameters. Does not wait for the device (unless `error_if_nonfinite`). Gradients
    that rest on the host are loaded slice by slice to be scaled, unless the host takes the optimizer's step
    (`Offload.step`): then it scales them where they rest. Their norms of order 2 were formed in backward; for another
    order, or after they were changed, they are loaded once more.

    Args:
        model: the model, or parameters, whose gradients are clipped. Plain parameters (`sw.shard(ignored=...)`) may be
            among them and count once: their gradients must be equal on all ranks.
        max_norm: the largest joint norm after clipping; `math.inf` only returns the norm and changes no gradient.
        norm_type: order of the norm, at least 0; `math.inf` is the largest magnitude.
        error_if_nonfinite: raise if the norm is infinite or NaN (waits for the device).

    Returns:
        The norm before clipping: plain, 0-d, global, equal on all ranks; 0 if there are no gradients.

    Raises:
        UsageError: `max_norm` is below 0, which would flip the sign of gradients, or not a number.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set; on every rank.
    """
    given: object = max_norm
    if not isinstance(given, int | float | Tensor) or not max_norm >= 0:
        raise UsageError(f"max_norm={max_norm!r}: must be at least 0; math.inf returns the norm without clipping")
    parameters = _parameters(model)
    if any(steps_in_backward(parameter) for parameter in parameters):
        BackwardSteps.refuse(
            "sw.clip_grad_norm_",
            "the norm of all gradients is known only after the last gradient, when the first ones have been freed; "
            "sw.optimizer_in_backward(model, optimizer, clip=1.0) clips each unit by its own norm",
        )
    return clip(parameters, max_norm, norm_type, error_if_nonfinite)


def clip(
    parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip as `clip_grad_norm_` does, for sharded parameters, also where the optimizer steps in backward."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    groups = [lists[0] for lists, _ in _group_tensors_by_device_and_dtype([[*gradients]]).values()]
    ordered = [gradient for group in groups for gradient in group if gradient is not None]
    norms = [of_kind.to(gradients[0].device) for _, of_kind in global_norms(ordered, float(norm_type))]
    total: Tensor = torch.linalg.vector_norm(torch.cat(norms) if len(norms) > 1 else norms[0], float(norm_type))
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the gradients' norm of order {norm_type} is {total.item()}, so they cannot be clipped")
    if max_norm == math.inf:
        return total
    scale = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    for group in groups:  # one kernel for each device and dtype
        gradients = [gradient for gradient in group if gradient is not None]
        pieces = [each.local if type(each) is ShardedParameter else each for each in gradients]
        torch._foreach_mul_(pieces, scale)
    return total


def _parameters(model: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return the sharded parameters, which hold the gradients, also where `sw.unshard` shows modules unsharded ones."""
    if isinstance(model, nn.Module):
        model = model.parameters()
    given = [model] if isinstance(model, Tensor) else list(model)
    found = ((parameter, sharded_of(parameter)) for parameter in given)
    return [parameter if sharded is None else sharded for parameter, sharded in found]

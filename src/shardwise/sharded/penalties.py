"""Gradients of losses that read parameters outside their units' forwards: a norm or a sum of squares as a penalty.

Such a loss is `c * S(p)`, S a whole-tensor reduction, equal on all ranks, and c whatever each rank's loss makes of
it. The gradient wanted is the mean over ranks, `mean(c) * dS/dp`, and of dS/dp every rank can form its own piece. So
where autograd hands a number down into the pieces its mean over the shard group takes its place: one small
collective for each parameter and penalty, in the order of the graph, which must be the same on all ranks. The mean
over replicas is taken of pieces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shardwise.comm.protocol import Collectives
from shardwise.sharded.placement import Placement

_in_hooks: list[None] = []
"""Not empty while gradients are handed out."""


@contextmanager
def hooks_run() -> Iterator[None]:
    """Backward is over and users' hooks run, with gradients that are the mean already: their numbers are their own."""
    _in_hooks.append(None)
    try:
        yield
    finally:
        _in_hooks.pop()


def are_in_backward() -> bool:
    """Whether this is a formula of autograd's: a backward is under way and records nothing."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled() and not _in_hooks


def meeting(grad: Tensor, placement: Placement) -> Tensor:
    """What a plain gradient, a number or a tensor of the whole shape, is to the pieces placed so: the mean over the
    shard group, of one element or as the piece. Every rank must call this."""
    group, fragment = placement.shard_group, placement.fragment
    if is_one_number(grad):
        mean = _mean(grad.as_strided((), ()), group)
        return mean if placement.shape else mean.reshape(1)  # among 0-d tensors dtypes promote as equals
    assert grad.shape == placement.shape, f"a gradient of {placement.fqn!r} of shape {tuple(grad.shape)}"
    return _mean(grad.reshape(-1), group)[fragment.start : fragment.stop]


def is_one_number(grad: Tensor) -> bool:
    """Whether it is a number, perhaps seen as a tensor."""
    return grad.numel() == 1 or (grad.numel() > 1 and not any(grad.stride()))


def _mean(values: Tensor, group: Collectives) -> Tensor:
    if group.world_size == 1:
        return values
    wide = torch.float64 if values.numel() == 1 else torch.promote_types(values.dtype, torch.float32)
    total = values.to(wide, copy=True).contiguous()
    group.all_reduce(total, "sum").wait()
    return (total / group.world_size).to(values.dtype)

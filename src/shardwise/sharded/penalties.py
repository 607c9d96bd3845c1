"""Gradients of losses that read parameters outside their units' forwards: a norm or a sum of squares as a penalty.

Such a loss is `c * S(p)`, S a whole-tensor reduction, equal on all ranks, and c whatever each rank's loss makes of
it. The gradient wanted is the mean over ranks, `mean(c) * dS/dp`, and every rank can compute its own piece of dS/dp. So
where autograd passes a number on to the pieces, its mean over the shard group replaces it: one small collective for
each parameter and penalty, in the order of the graph, which must be the same on all ranks. The mean over replicas is
taken of the pieces."""

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
    """Inside, backward is over and users' hooks run on gradients that are means already: nothing is averaged again."""
    _in_hooks.append(None)
    try:
        yield
    finally:
        _in_hooks.pop()


def are_in_backward() -> bool:
    """Whether a backward formula of autograd is running: a backward is under way that records nothing, and no hooks run
    (`hooks_run`)."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled() and not _in_hooks


def meeting(grad: Tensor, placement: Placement) -> Tensor:
    """Return what replaces a plain gradient, a number or a tensor of the whole shape, that meets pieces placed so: its
    mean over the shard group, as one element or as this rank's piece. Every rank must call this."""
    group, fragment = placement.shard_group, placement.fragment
    if is_one_number(grad):
        mean = _mean(grad.as_strided((), ()), group)
        return mean if placement.shape else mean.reshape(1)  # among 0-d tensors dtypes promote as equals
    assert grad.shape == placement.shape, f"a gradient of {placement.fqn!r} of shape {tuple(grad.shape)}"
    return _mean(grad.reshape(-1), group)[fragment.start : fragment.stop]


def is_one_number(grad: Tensor) -> bool:
    """Whether it is a single number, perhaps expanded to a larger shape."""
    return grad.numel() == 1 or (grad.numel() > 1 and not any(grad.stride()))


def _mean(values: Tensor, group: Collectives) -> Tensor:
    if group.world_size == 1:
        return values
    wide = torch.float64 if values.numel() == 1 else torch.promote_types(values.dtype, torch.float32)
    total = values.to(wide, copy=True).contiguous()
    group.all_reduce(total, "sum").wait()
    return (total / group.world_size).to(values.dtype)

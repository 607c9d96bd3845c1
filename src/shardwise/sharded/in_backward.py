"""Backward formulas that meet sharded parameters: whether one runs, and the error where pieces cannot serve it.

A loss may compute with a parameter outside its model's forward, a norm as a penalty. Its gradient would need each
rank's coefficient or the whole parameter, so it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch

from shardwise.errors import UsageError

_in_hooks: list[None] = []
"""Not empty while gradients are handed out."""


@contextmanager
def hooks_run() -> Iterator[None]:
    """Inside, users' hooks and optimizers' steps run on gradients that are reduced already: on pieces."""
    _in_hooks.append(None)
    try:
        yield
    finally:
        _in_hooks.pop()


def are_in_backward() -> bool:
    """Whether a backward formula of autograd is running: a backward is under way that records nothing, and no hooks run
    (`hooks_run`)."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled() and not _in_hooks


def refuse_penalty(fqn: str) -> NoReturn:
    """Raise the UsageError for a loss that computes with a sharded parameter outside the model's forward."""
    raise UsageError(
        f"the loss computes with the sharded parameter {fqn!r} outside the model's forward, as a penalty on its norm "
        "does: use the optimizer's weight_decay, compute the term in the model's forward, or call "
        "sw.unshard(model) before the loss is computed"
    )

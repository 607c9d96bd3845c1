"""A step has the memory of parameters that were gathered for inspection before it."""

from __future__ import annotations

from functools import partial

import torch

from shardwise.engine.checked import CheckedEngine
from shardwise.sharded.extensions.unit_gather import forget


def attach(engine: CheckedEngine) -> None:
    """Called with each engine that has its units."""
    engine.hooks.begin_step.append(partial(_forget, engine))


def _forget(engine: CheckedEngine) -> None:
    if torch.is_grad_enabled():  # on every rank; else a rank may be evaluating alone
        forget(engine.units)

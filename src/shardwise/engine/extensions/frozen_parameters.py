"""A warning about parameters that were frozen after `sw.shard` put them into groups with trained ones: a backward
reduces them all the same."""

from __future__ import annotations

import warnings
import weakref
from functools import partial

from shardwise.engine.checked import CheckedEngine
from shardwise.fsdp.unit import Unit

_warned: weakref.WeakSet[Unit] = weakref.WeakSet()
"""Root units of the models for which the warning was given."""


def _warn(engine: CheckedEngine) -> None:
    """Warn, once for a model, that a backward reduces more than is trained, and say how to avoid that.

    A group is reduced as a whole; only one without a trainable parameter is left out.
    """
    units = engine.units
    if not engine.is_rank0 or units[0] in _warned:
        return
    reduced = [group for unit in units for group in unit.groups if group.trainable]
    frozen = [p for group in reduced for p in group.sharded if not p.requires_grad and p.numel()]
    if not frozen:
        return
    _warned.add(units[0])
    everything = sum(group.layout.used_numel for group in reduced)
    trained = everything - sum(parameter.numel() for parameter in frozen)
    shown = ", ".join(repr(parameter.fqn) for parameter in frozen[:3])
    shown += f" and {len(frozen) - 3} more" if len(frozen) > 3 else ""
    warnings.warn(
        f"shardwise: {shown} are frozen but share groups with trained parameters, because requires_grad changed after "
        f"sw.shard: each backward reduces {everything:,} elements for {trained:,} trained ones. Call "
        "requires_grad_(False) before sw.shard, which puts frozen parameters in groups of their own",
        stacklevel=2,
    )


def attach(engine: CheckedEngine) -> None:
    """Called with each engine that has its units."""
    engine.hooks.follow_requires_grad.append(partial(_warn, engine))

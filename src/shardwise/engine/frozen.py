"""A warning about parameters that were frozen after `sw.shard` put them into groups with trained ones: a backward
reduces them all the same."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence

from shardwise.engine.units.unit import Unit

_told: weakref.WeakSet[Unit] = weakref.WeakSet()
"""Root units of the models for which the warning was given."""


def warn_of_frozen(units: Sequence[Unit]) -> None:
    """Warn, once for a model, that a backward reduces more than is trained, and say how to avoid that.

    To be called after the engine has followed a change of `requires_grad`. A group is reduced as a whole; only one
    without a trainable parameter is left out.
    """
    if units[0] in _told:
        return
    reduced = [group for unit in units for group in unit.groups if group.trainable]
    frozen = [p for group in reduced for p in group.sharded if not p.requires_grad and p.numel()]
    if not frozen:
        return
    _told.add(units[0])
    everything = sum(group.layout.used_numel for group in reduced)
    trained = everything - sum(parameter.numel() for parameter in frozen)
    shown = ", ".join(repr(parameter.fqn) for parameter in frozen[:3])
    shown += f" and {len(frozen) - 3} more" if len(frozen) > 3 else ""
    warnings.warn(
        f"shardwise: {shown} do not train but lie in groups that do, because requires_grad changed after sw.shard: "
        f"each backward reduces {everything:,} elements for {trained:,} trained ones. Call requires_grad_(False) "
        "before sw.shard, which lays frozen parameters apart",
        stacklevel=2,
    )

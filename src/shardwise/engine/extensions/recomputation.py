"""Checkpoints around units in which ranks run different code: ranks begin the backward of the same calls first.

Example: a checkpoint around a unit A and then a layer that only rank 1 runs. On rank 0 the gradient of A's output
arrives, A's backward begins, and a saved tensor of A starts the recomputation. On rank 1 a saved tensor of the layer
starts it, before that gradient. There too A's backward begins first, so both gather alike.
"""

from __future__ import annotations

from functools import partial

import torch

from shardwise.engine.checked import CheckedEngine
from shardwise.fsdp.schedule import ForwardPass
from shardwise.fsdp.unit import Unit


def _walk_to_recomputation(engine: CheckedEngine, unit: Unit) -> None:
    """Called when a forward of the unit begins. If a checkpoint recomputes it, walk back to where backward has come."""
    backward = torch._C._current_graph_task_id()
    if backward != -1 and engine.walked and not unit.in_backward:
        newest = engine.walked[-1]
        engine.walk(newest, _point_of_recomputation(newest, unit, backward))


def _point_of_recomputation(forward: ForwardPass[Unit], unit: Unit, backward: int) -> int:
    """Return the point that `backward` has come to if it recomputes a call of the unit: that at which the call that
    ended last ended, with those inside it that ended with it."""
    points = forward.points
    come_to = len(points)
    if backward != forward.backward or all(call.unit is not unit for call in points[: forward.position]):
        return come_to
    for position in reversed(range(forward.position)):
        call = points[position]
        if call.has_backward and position != call.end:
            break
        come_to = position
    return come_to


def attach(engine: CheckedEngine) -> None:
    """Called with each engine that has its units."""
    engine.hooks.begin_forward.append(partial(_walk_to_recomputation, engine))

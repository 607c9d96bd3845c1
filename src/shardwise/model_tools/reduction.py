"""When and how gradients are reduced, for a whole model or for some of its units, changed from step to step.

Every function takes a sharded model, a module inside one, or one around several, and means whole units: those with a
parameter at or below the module. With `recurse=False` only the unit that the module itself is. Every rank must do
alike, outside backward; nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.engine import Backward, Engine
from shardwise.engine.lookup import engines_of, units_at
from shardwise.engine.units.settings import Reducing
from shardwise.engine.units.unit import Unit
from shardwise.errors import UsageError


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside accumulate gradients locally, unreduced; the first one outside reduces the sum.

    Costs a full gradient buffer per unit from then on (SHARD_OPTIMIZER has them anyway). Every rank must do so alike.
    What waits is not in `.grad` yet, where a placeholder stands for it. `zero_grad()` of an optimizer or of any module
    drops it, and so does `p.grad = None`; every rank must drop the same. Clipping and `optimizer.step()` before
    the sum are errors. `model` is a sharded model, a module inside one, whose units alone accumulate, or a module
    around several.
    """
    with synced(model, False):
        yield


@contextmanager
def synced(model: nn.Module, wanted: bool = True) -> Iterator[None]:
    """Backwards inside reduce gradients, or do not, whatever was said outside: also inside `no_sync`."""
    before = [(engine, unit, unit.gradients.reducing.now) for engine, unit in _units(model, True)]
    try:
        sync_gradients(model, wanted)  # may raise half way
        yield
    finally:
        for engine, unit, now in before:
            _change(engine, unit, now=now)


def sync_gradients(module: nn.Module, wanted: bool, recurse: bool = True) -> None:
    """Whether backwards reduce these units' gradients or accumulate them as in `no_sync`, from now on."""
    for engine, unit in _units(module, recurse):
        _change(engine, unit, now=wanted)


def sync_replicas(module: nn.Module, wanted: bool, recurse: bool = True) -> None:
    """Whether backwards of a hybrid strategy sum these units' gradients over the replicas too, or only in the shard
    group, where they accumulate: a reduce_scatter for each micro-batch and an all_reduce for each step. They wait in
    1 / N of the memory that `no_sync` takes, and otherwise as there. Without replicas there is nothing to say; where
    nothing is sharded, this is `sync_gradients`."""
    for engine, unit in _units(module, recurse):
        if engine.mesh.shard.world_size == 1:
            _change(engine, unit, now=wanted)
        elif engine.mesh.replicate.world_size > 1:
            _change(engine, unit, over_replicas=wanted)


def reduce_waiting(module: nn.Module) -> None:
    """Reduce now what `no_sync` left waiting, in `.grad` afterwards, as the next backward would. Every rank must call
    this, outside backward.

    Of the models that `module` is part of, or around. Units that `sync_gradients` has wait go on waiting, and so do
    slices that wait for the replicas (`sync_replicas`). Where nothing waits on any rank nothing changes. Raises
    UsageError inside a backward.
    """
    engines = dict.fromkeys(engine for engine, _ in _units(module, True))
    if torch._C._current_graph_task_id() >= 0:
        raise UsageError("what waits is reduced by the backward under way: call reduce_waiting outside it")
    for engine in engines:  # reductions end where a backward does: this one brings no gradient
        with torch.enable_grad():
            end = torch.zeros((), requires_grad=True).exp()
        end.register_hook(partial(_begin_backward, engine))
        torch.autograd.backward(end)


def _begin_backward(engine: Engine, grad: Tensor) -> None:
    engine.begin_backward()


def divide_gradients(module: nn.Module, by: float | None, recurse: bool = True) -> None:
    """What sums over ranks are divided by, from the next gradient on: 1 for the sum, None for the mean over all ranks.

    Raises UsageError unless it is positive.
    """
    if by is not None and by <= 0:
        raise UsageError(f"divide_gradients(by={by!r}): a positive number, or None for the number of ranks")
    for engine, unit in _units(module, recurse):
        _change(engine, unit, divisor=by)


def hook_gradients(module: nn.Module, hook: Callable[[Tensor], None] | None, recurse: bool = True) -> None:
    """Have `hook` called with this rank's slice of every reduction of these units, 1-D, in the reduce dtype, one call a
    group: the mean over all ranks, before it is added to `.grad`. What the hook writes into it in place counts. For
    sums over further ranks, compression and the like. None: no hook. Costs a slice a unit where there are no replicas.
    """
    for engine, unit in _units(module, recurse):
        _change(engine, unit, hook=hook)


def _units(module: nn.Module, recurse: bool) -> Sequence[tuple[Engine, Unit]]:
    found = []
    for engine in engines_of(module):
        if engine.backward is Backward.RUNNING:
            raise UsageError("how gradients are reduced cannot change inside a backward of the model: do it before")
        found += [(engine, unit) for unit in units_at(engine, module, recurse)]
    return found


def _change(engine: Engine, unit: Unit, **changes: Any) -> None:
    reducing: Reducing = replace(unit.gradients.reducing, **changes)
    engine.reducer.reduce_as(unit, reducing)

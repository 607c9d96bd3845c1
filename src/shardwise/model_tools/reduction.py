"""When and how gradients are reduced, for a whole model or for some of its units; may change from step to step.

Every function takes a sharded model, a module inside one, or a module around several, and applies to whole units: those
with a parameter at or below the module; with `recurse=False` only the unit that the module itself is. Every rank must
make the same calls, outside backward. Only `reduce_waiting` communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from shardwise.engine.checked import CheckedEngine
from shardwise.engine.extensions.custom_reduction import change_settings, settings_of
from shardwise.engine.lookup import engines_of, units_at
from shardwise.errors import UsageError
from shardwise.fsdp.engine import Backward
from shardwise.fsdp.unit import Unit


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients locally, without reducing them, in each backward inside the context. The first backward
    after it reduces the sum.

    Costs a full-size gradient buffer for each unit from then on (SHARD_OPTIMIZER has these anyway). Every rank must
    enter and leave it alike. Until the sum is reduced, `.grad` holds only a placeholder. `zero_grad()` of an optimizer
    or of any module drops the accumulated gradients, and so does `p.grad = None`; every rank must drop the same ones.
    Clipping and `optimizer.step()` before the reduction are errors. `model` is a sharded model, a module inside one
    (then only its units accumulate), or a module around several.
    """
    with synced(model, False):
        yield


@contextmanager
def synced(model: nn.Module, wanted: bool = True) -> Iterator[None]:
    """Reduce gradients in backwards inside the context, or do not, whatever is set outside; also inside `no_sync`."""
    before = [(engine, unit, settings_of(unit).now) for engine, unit in _units(model, True)]
    try:
        sync_gradients(model, wanted)  # may raise halfway
        yield
    finally:
        for engine, unit, now in before:
            change_settings(engine, unit, now=now)


def sync_gradients(module: nn.Module, wanted: bool, recurse: bool = True) -> None:
    """Set whether backwards reduce these units' gradients from now on, or accumulate them as in `no_sync`."""
    for engine, unit in _units(module, recurse):
        change_settings(engine, unit, now=wanted)


def sync_replicas(module: nn.Module, wanted: bool, recurse: bool = True) -> None:
    """Set whether backwards of a hybrid strategy sum these units' gradients over the replicas too, or only in the shard
    group and accumulate the slices: then each micro-batch has a reduce_scatter and only each step an all_reduce.

    With N ranks in the shard group the slices take 1 / N of the memory that `no_sync` needs; its other rules apply here
    too. Does nothing without replicas; if nothing is sharded, this is `sync_gradients`.
    """
    for engine, unit in _units(module, recurse):
        has_replicas = unit.mesh.replicate.world_size > 1
        if has_replicas and unit.mesh.shard.world_size > 1:
            change_settings(engine, unit, over_replicas=wanted)
        elif has_replicas or engine.mesh.shard.world_size == 1:
            change_settings(engine, unit, now=wanted)


def reduce_waiting(module: nn.Module) -> None:
    """Reduce now the gradients that `no_sync` left waiting and store the result in `.grad`, as the next backward would.
    Every rank must call this, outside backward.

    Applies to every model that `module` contains or is part of. Units that `sync_gradients` set to accumulate go on
    accumulating, and so do slices held back from the replicas (`sync_replicas`). Does nothing if no rank has
    accumulated gradients. Raises UsageError inside a backward.
    """
    engines = dict.fromkeys(engine for engine, _ in _units(module, True))
    if torch._C._current_graph_task_id() >= 0:
        raise UsageError(
            "reduce_waiting inside a backward, which reduces the waiting gradients itself: call it outside"
        )
    for engine in engines:  # reductions end with a backward, so run one that computes no gradient
        with torch.enable_grad():
            end = torch.zeros((), requires_grad=True).exp()
        end.register_hook(partial(_begin_backward, engine))
        torch.autograd.backward(end)


def _begin_backward(engine: CheckedEngine, grad: Tensor) -> None:
    engine.begin_backward()


def divide_gradients(module: nn.Module, by: float | None, recurse: bool = True) -> None:
    """Set the number that sums over ranks are divided by, from the next gradient on: 1 gives the sum, None the mean
    over all ranks.

    Raises UsageError if `by` is not positive.
    """
    if by is not None and by <= 0:
        raise UsageError(f"divide_gradients(by={by!r}): must be a positive number, or None for the number of ranks")
    for engine, unit in _units(module, recurse):
        change_settings(engine, unit, divisor=by)


def hook_gradients(module: nn.Module, hook: Callable[[Tensor], None] | None, recurse: bool = True) -> None:
    """Call `hook` with this rank's slice of each reduction of these units, once for each group: 1-D, in the reduce
    dtype, the mean over all ranks, before it is added to `.grad`.

    The hook may change the slice in place, to sum over further ranks or to compress, for example. None removes the
    hook. Without replicas this costs memory for one slice of each unit.
    """
    for engine, unit in _units(module, recurse):
        change_settings(engine, unit, hook=hook)


def _units(module: nn.Module, recurse: bool) -> Sequence[tuple[CheckedEngine, Unit]]:
    found = []
    for engine in engines_of(module):
        if engine.backward is Backward.RUNNING:
            raise UsageError(
                "the way gradients are reduced cannot change inside a backward of the model: change it before"
            )
        found += [(engine, unit) for unit in units_at(engine, module, recurse)]
    return found

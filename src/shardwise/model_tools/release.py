"""The memory of slots between steps: given back, and what there is of it from the next forward on."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.engine.engine import Engine
from shardwise.engine.lookup import engines_of, gradient_stores, shard_stores, units_at
from shardwise.engine.setup.module_methods import give_up_interrupted
from shardwise.errors import UsageError
from shardwise.sharded.whole import forget


def release(model: nn.Module) -> None:
    """Give back the memory of slots and reduce slots until the next forward. Every rank must call this, between steps.

    What stays is a rank's shards, gradients that are in `.grad` and optimizer state. Slots are otherwise kept from the
    first forward on, so that a step allocates nothing; the next forward allocates them anew. Of use where something
    else needs the memory between steps: an evaluation of another model, a checkpoint that gathers.

    Args:
        model: a sharded model, a module inside one, or one around several: whole models are meant. On a device the
            memory goes to torch's caching allocator, from which its `empty_cache()` returns it.

    Raises:
        UsageError: the module is not sharded; a forward, a backward or `sw.unsharded` of its model is under way; or
            gradients of a backward inside `sw.no_sync` wait in reduce slots.
    """
    engines = _between_steps(model, "sw.release")
    for unit in (unit for engine in engines for unit in engine.units):
        if unit.gradients.forget_dropped():
            raise UsageError(
                f"sw.release while gradients of unit {unit.fqn!r} wait to be reduced since a backward inside "
                "sw.no_sync: run a backward outside sw.no_sync first, or drop them with zero_grad()"
            )
    for engine in engines:
        engine.release()
        forget(engine.units)
        for store in (*shard_stores(engine), *gradient_stores(engine)):
            store.release()


def reshard_after_forward(module: nn.Module, wanted: bool, recurse: bool = True) -> None:
    """Whether these units give their slots back after forward, from now on, as `sw.shard` was told at first. Every rank
    must call this, between steps.

    Slots are allocated anew, as many as there have to be now.

    Args:
        module: a sharded model or a module inside one. Whole units are meant: those with a parameter at or below it;
            with `recurse=False` the unit that the module itself is.

    Raises:
        UsageError: the module is not sharded; or a forward, a backward or `sw.unsharded` of its model is under way.
    """
    for engine in _between_steps(module, "reshard_after_forward"):
        engine.reshard_all()
        engine.unsharder.release(engine.units)
        for unit in units_at(engine, module, recurse):
            unit.keep_after_forward(not wanted)
        with torch.inference_mode(False), torch.no_grad():
            engine.unsharder.allocate(engine.units)


def _between_steps(model: nn.Module, what: str) -> list[Engine]:
    engines = engines_of(model)
    if any(engine.is_suspended or not give_up_interrupted(engine) for engine in engines):
        raise UsageError(f"{what} inside a forward, a backward or sw.unsharded of the same model: leave that first")
    return engines

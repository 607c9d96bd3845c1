"""The memory of slots between steps: freeing it, and changing which units keep their slots after forward."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.engine.checked import CheckedEngine
from shardwise.engine.extensions.custom_reduction import forget_dropped
from shardwise.engine.extensions.offloaded import gradient_stores, shard_stores
from shardwise.engine.lookup import engines_of, units_at
from shardwise.engine.setup.module_methods import give_up_interrupted
from shardwise.errors import UsageError
from shardwise.sharded.extensions.unit_gather import forget


def release(model: nn.Module) -> None:
    """Free the slots and reduce slots until the next forward. Every rank must call this, between steps.

    This rank's shards, gradients in `.grad` and optimizer state stay allocated. Slots are normally kept from the first
    forward on, so that a step allocates nothing; after this call the next forward allocates them again. Use it when
    something else needs the memory between steps: an evaluation of another model, or a checkpoint that gathers.

    Args:
        model: a sharded model, a module inside one, or a module around several. The slots of each whole sharded model
            are freed. On a device the memory returns to torch's caching allocator; its `empty_cache()` frees it there.

    Raises:
        UsageError: the module is not sharded; a forward, a backward or `sw.unsharded` of its model is under way; or
            gradients of a backward inside `sw.no_sync` still wait to be reduced.
    """
    engines = _between_steps(model, "sw.release")
    for unit in (unit for engine in engines for unit in engine.units):
        if forget_dropped(unit):
            raise UsageError(
                f"sw.release while gradients of {unit} from a backward inside sw.no_sync wait to be "
                "reduced: run a backward outside sw.no_sync first, or drop them with zero_grad()"
            )
    for engine in engines:
        engine.release()
        forget(engine.units)
        for store in (*shard_stores(engine), *gradient_stores(engine)):
            store.release()


def reshard_after_forward(module: nn.Module, wanted: bool, recurse: bool = True) -> None:
    """Set whether these units are resharded after forward from now on, which an argument of `sw.shard` set at first.
    Every rank must call this, between steps.

    Frees the slots and allocates as many as are needed now.

    Args:
        module: a sharded model, a module inside one, or a module around several. Applies to every unit with a parameter
            at or below it; with `recurse=False` only to the unit that the module itself is.
        wanted: True reshards; False keeps the units gathered until their backward.

    Raises:
        UsageError: the module is not sharded; or a forward, a backward or `sw.unsharded` of its model is under way.
    """
    for engine in _between_steps(module, "reshard_after_forward"):
        engine.reshard_all()
        engine.unsharder.release(engine.units)
        for unit in units_at(engine, module, recurse):
            unit.set_resharding(wanted)
        with torch.inference_mode(False), torch.no_grad():
            engine.unsharder.allocate(engine.units)


def _between_steps(model: nn.Module, what: str) -> list[CheckedEngine]:
    engines = engines_of(model)
    if any(engine.is_suspended or not give_up_interrupted(engine) for engine in engines):
        raise UsageError(f"{what} inside a forward, a backward or sw.unsharded of the same model: leave that first")
    return engines

"""The memory of slots, given back between steps."""

from __future__ import annotations

from torch import nn

from shardwise.engine.lookup import engines_of
from shardwise.engine.setup.module_methods import give_up_interrupted
from shardwise.errors import UsageError


def release(model: nn.Module) -> None:
    """Give back the memory of slots and reduce slots until the next forward. Every rank must call this, between steps.

    What stays is a rank's shards, gradients that are in `.grad` and optimizer state. Slots are otherwise kept from the
    first forward on, so that a step allocates nothing; the next forward allocates them anew. Of use where something
    else needs the memory between steps: an evaluation of another model, a checkpoint that gathers.

    Args:
        model: a sharded model, a module inside one, or one around several: whole models are meant. On a device the
            memory goes to torch's caching allocator; `torch.accelerator.empty_cache()` returns it from there.

    Raises:
        UsageError: the module is not sharded; a forward, a backward or `sw.unsharded` of its model is under way; or
            gradients of a backward inside `sw.no_sync` wait in reduce slots.
    """
    engines = engines_of(model)
    if any(engine.is_suspended or not give_up_interrupted(engine) for engine in engines):
        raise UsageError("sw.release inside a forward, a backward or sw.unsharded of the same model: leave that first")
    for engine in engines:
        engine.release()

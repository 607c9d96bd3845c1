"""Finds the engine that serves a module: it is stored in the `__dict__` of the module that was given to `shard`."""

from __future__ import annotations

from torch import nn

from shardwise.engine.checked import CheckedEngine
from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter, sharded_of
from shardwise.fsdp.unit import Unit

_ENGINE = "_shardwise_engine"


def set_engine(model: nn.Module, engine: CheckedEngine) -> None:
    """Let `engine` serve `model` from now on."""
    model.__dict__[_ENGINE] = engine


def take_engine(model: nn.Module) -> CheckedEngine:
    """Remove and return the engine of a module that was given to `shard`."""
    engine: CheckedEngine = model.__dict__.pop(_ENGINE)
    return engine


def engine_of(model: nn.Module, below: bool = True) -> CheckedEngine | None:
    """Return the engine that `shard` gave the module, or None; with `below`, else that of a module below it."""
    for module in model.modules() if below else (model,):
        engine: CheckedEngine | None = module.__dict__.get(_ENGINE)
        if engine is not None:
            return engine
    return None


def engines_by_name(model: nn.Module) -> dict[str, CheckedEngine]:
    """Return the engine of every sharded model at or below the module, by the model's name within the module."""
    return {fqn: engine for fqn, module in model.named_modules() if (engine := module.__dict__.get(_ENGINE))}


def engines_below(model: nn.Module) -> list[CheckedEngine]:
    """Return the engines of all sharded models at or below the module, in module order. Raises UsageError if there is
    none."""
    engines = list(dict.fromkeys(engines_by_name(model).values()))
    if not engines:
        raise _not_sharded(model)
    return engines


def engines_of(model: nn.Module) -> list[CheckedEngine]:
    """Return every engine that serves a part of the module, in module order: those of sharded models at or below it,
    and that of the model that it is a part of. Raises UsageError if there is none."""
    engines: dict[CheckedEngine, None] = {}
    for module in model.modules():
        if _ENGINE in module.__dict__:
            engines[module.__dict__[_ENGINE]] = None
        for held in module._parameters.values():
            sharded = held if held is None or isinstance(held, ShardedParameter) else sharded_of(held)
            if (
                sharded is not None
                and isinstance(sharded.unit, Unit)
                and isinstance(sharded.unit.listener, CheckedEngine)
            ):
                engines[sharded.unit.listener] = None
    if not engines:
        raise _not_sharded(model)
    return list(engines)


def units_at(engine: CheckedEngine, module: nn.Module, recurse: bool = True) -> list[Unit]:
    """Return the engine's units that have a parameter at or below the module; without `recurse`, only the unit of the
    module itself."""
    if not recurse:
        return [unit for unit in engine.units if module in unit.modules]
    within = {id(below) for below in module.modules()}
    return [
        unit
        for unit in engine.units
        if any(id(site.module) in within for group in unit.groups for sites in group.sites for site in sites)
    ]


def require_engine(model: nn.Module) -> CheckedEngine:
    """Like `engine_of`, but raise UsageError if there is none."""
    engine = engine_of(model)
    if engine is None:
        raise _not_sharded(model)
    return engine


def _not_sharded(model: nn.Module) -> UsageError:
    return UsageError(f"{type(model).__name__} is not sharded; call sw.shard(model, ...) first")

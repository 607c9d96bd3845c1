"""Which engine serves a module: it lies in the dictionary of the module that was given to `shard`."""

from __future__ import annotations

from torch import Tensor, nn

from shardwise.engine.engine import Engine
from shardwise.engine.units.unit import Unit
from shardwise.errors import UsageError
from shardwise.offload.shard_store import ShardStore
from shardwise.sharded.parameter import ShardedParameter, outer_face

_ENGINE = "_shardwise_engine"


def set_engine(model: nn.Module, engine: Engine) -> None:
    """From here on `engine` serves `model`."""
    model.__dict__[_ENGINE] = engine


def take_engine(model: nn.Module) -> Engine:
    """The engine of a module that was given to `shard`, which then has none."""
    engine: Engine = model.__dict__.pop(_ENGINE)
    return engine


def engine_of(model: nn.Module, below: bool = True) -> Engine | None:
    """The engine that `shard` gave the module; with `below`, or else the one that a module below it has."""
    for module in model.modules() if below else (model,):
        engine: Engine | None = module.__dict__.get(_ENGINE)
        if engine is not None:
            return engine
    return None


def engines_by_name(model: nn.Module) -> dict[str, Engine]:
    """Of every sharded model at or below the module, by its name from there."""
    return {fqn: engine for fqn, module in model.named_modules() if (engine := module.__dict__.get(_ENGINE))}


def engines_below(model: nn.Module) -> list[Engine]:
    """Of every sharded model at or below the module, in module order. Raises UsageError if there is none."""
    engines = list(dict.fromkeys(engines_by_name(model).values()))
    if not engines:
        raise _not_sharded(model)
    return engines


def engines_of(model: nn.Module) -> list[Engine]:
    """Every engine that serves something of the module, in module order: of sharded models at or below it, and of the
    one that it is a part of. Raises UsageError if there is none."""
    engines: dict[Engine, None] = {}
    for module in model.modules():
        if _ENGINE in module.__dict__:
            engines[module.__dict__[_ENGINE]] = None
        for parameter in module._parameters.values():
            face = parameter if parameter is None or isinstance(parameter, ShardedParameter) else outer_face(parameter)
            if face is not None and isinstance(face.unit, Unit) and isinstance(face.unit.listener, Engine):
                engines[face.unit.listener] = None
    if not engines:
        raise _not_sharded(model)
    return list(engines)


def units_at(engine: Engine, module: nn.Module, recurse: bool = True) -> list[Unit]:
    """The engine's units with a parameter that stands at or below the module; without `recurse` the one that the module
    itself is."""
    if not recurse:
        return [unit for unit in engine.units if module in unit.modules]
    within = {id(below) for below in module.modules()}
    return [
        unit
        for unit in engine.units
        if any(id(site.module) in within for group in unit.groups for sites in group.sites for site in sites)
    ]


def shard_stores(*engines: Engine) -> list[ShardStore]:
    """What has shards of their units that rest elsewhere than on the device."""
    homes = (group.home for engine in engines for unit in engine.units for group in unit.groups)
    return list(dict.fromkeys(home.store for home in homes if home is not None))


def gradient_stores(*engines: Engine) -> list[ShardStore]:
    """Likewise reduced gradients."""
    stores = (group.gradients.store for engine in engines for unit in engine.units for group in unit.groups)
    return list(dict.fromkeys(store for store in stores if store is not None))


def steps_in_backward(parameter: Tensor) -> bool:
    """Whether an optimizer takes steps of the parameter's model in backward (`sw.optimizer_in_backward`)."""
    unit = parameter.unit if isinstance(parameter, ShardedParameter) else None
    engine = unit.listener if isinstance(unit, Unit) else None
    return isinstance(engine, Engine) and engine.reducer.steps.are_taken


def require_engine(model: nn.Module) -> Engine:
    """As `engine_of`. Raises UsageError if there is none."""
    engine = engine_of(model)
    if engine is None:
        raise _not_sharded(model)
    return engine


def _not_sharded(model: nn.Module) -> UsageError:
    return UsageError(f"{type(model).__name__} is not sharded; call sw.shard(model, ...) first")

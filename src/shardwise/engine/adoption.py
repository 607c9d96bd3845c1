"""`shard` on an ancestor of sharded modules: their units go on in the new engine, with the settings that they have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.engine.copying import refuse_to_copy
from shardwise.engine.engine import Engine
from shardwise.engine.lookup import take_engine
from shardwise.engine.mesh import Mesh, spans_of
from shardwise.engine.units.unit import Unit
from shardwise.errors import UsageError
from shardwise.policy.precision import Precision
from shardwise.policy.strategy import Strategy


def settle(
    below: Mapping[str, Engine],
    strategy: Strategy,
    mesh: DeviceMesh | Mesh | None,
    precision: Precision | None,
    resharding: bool | int | None,
) -> tuple[Precision, bool | int]:
    """What a call leaves open is as the units below have it, by the module that was sharded. Raises UsageError where
    they have something else than is asked, or than one another."""
    asked: dict[str, Any] = {
        "strategy": strategy.value,
        "mesh": None if mesh is None or not below else spans_of(strategy, mesh),
        "precision": precision and _of_units(precision),
        "reshard_after_forward": resharding,
    }
    for fqn, engine in below.items():
        precision = engine.precision if precision is None else precision
        theirs = {
            "strategy": engine.strategy.value,
            "mesh": engine.mesh.spans,
            "precision": _of_units(engine.precision),
            "reshard_after_forward": engine.mesh.secondary_size or not engine.keeps_params,
        }
        for name, value in theirs.items():
            if asked[name] is None:
                asked[name] = value
            elif asked[name] != value:
                raise UsageError(
                    f"sw.shard was asked for {name}={asked[name]!r}, but {fqn!r} below was sharded with {value!r}, "
                    f"which its units keep: give every sw.shard call of a model the same {name}"
                )
    resharding = asked["reshard_after_forward"]
    return precision or Precision(), not strategy.keeps_params if resharding is None else resharding


def _of_units(precision: Precision) -> Precision:
    """Without the settings that concern only the module given to `shard`."""
    return Precision(param=precision.param, reduce=precision.reduce, master=precision.master)


def clear_up(engines: Iterable[Engine]) -> None:
    """Have modules hold their sharded parameters, whatever was interrupted. Raises UsageError inside `sw.unsharded`."""
    engines = list(engines)
    if any(engine.is_suspended for engine in engines):
        raise UsageError("sw.shard inside sw.unsharded of a model below: leave that first")
    for engine in engines:
        engine.clear_up()


def take_over(module: nn.Module) -> Engine:
    """The module's engine, which has given up its units to the one that is being made."""
    engine = take_engine(module)
    refuse_to_copy(module)
    engine.hand_over()
    return engine


def in_module_order(model: nn.Module, own: Sequence[Unit], adopted: Sequence[Unit], mesh: Mesh) -> list[Unit]:
    """All units, outermost first, each knowing those around it and its name from `model`."""
    by_module: dict[int, list[Unit]] = {}
    for unit in (*own, *(unit for unit in adopted if unit.groups)):
        by_module.setdefault(id(unit.module), []).append(unit)
    ordered: list[Unit] = []

    def visit(fqn: str, module: nn.Module, around: tuple[Unit, ...]) -> None:
        for unit in by_module.pop(id(module), ()):
            if unit in adopted:
                unit.rebase(fqn, mesh.shard)
            unit.lie_in(around)
            ordered.append(unit)
            around = (*around, unit)
        for name, child in module.named_children():
            visit(f"{fqn}.{name}" if fqn else name, child, around)

    visit("", model, ())
    return ordered

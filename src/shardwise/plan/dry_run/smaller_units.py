"""Names of module classes that make the units of a model smaller, where its largest unit has modules inside."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any, NamedTuple, Self

from torch import nn

from shardwise.engine.setup.planners import nesting, planners_for
from shardwise.fsdp.shard import UnitPlan, assign_parameters, choose_units
from shardwise.fsdp.slots import size_classes
from shardwise.fsdp.strategy import LEAST_SLOTS
from shardwise.model_tools.classes import classes_named

_SMALLER = 0.8
"""Names are worth having if slots then have at most this part of their elements."""
_WORTH = 1 / 64
"""The modules that become units have at least this part of the elements of the unit around them."""
_MOST_LEVELS = 4
"""How deep inside the first largest unit it is looked for others."""


def smaller_units(model: nn.Module, units: Any) -> tuple[tuple[tuple[str, ...], int], ...]:
    """Return names of classes for `units=` and the slots that they need at least, each with less to gather at a time
    than the one before; none if the largest unit has no modules inside that leave less.

    The class of the largest unit is replaced by those of the modules inside it, again and again; or its linear layers
    become units inside it. Other modules of torch.nn are left out, because their classes are all over the model, and so
    are small ones. What no class names is the root's.

    Args:
        model: before it is sharded.
        units: as for `sw.shard`.
    """
    usual = _Units.of(model, units)
    names = _names(model, units)
    asked: list[set[str]] = []
    if names and usual.largest is not model and _has_large_linear(usual.largest):
        asked.append(names | {nn.Linear.__name__})
    inner = usual.largest
    for _ in range(_MOST_LEVELS):
        inside = {kind.__name__ for kind in _classes_inside(inner)}
        if inner is model or not inside:
            break
        names = (names - {type(inner).__name__}) | inside
        asked.append(names)
        inner = _Units.of(model, classes_named(model, names, "units")).largest
    tried = [(_Units.of(model, classes_named(model, each, "units")), sorted(each)) for each in asked]
    found: list[tuple[tuple[str, ...], int]] = []
    least = usual.numel
    for chosen, each in sorted(tried, key=lambda one: -one[0].numel):
        if chosen.numel <= _SMALLER * least:
            found.append((tuple(each), chosen.slots))
            least = chosen.numel
    return tuple(found)


class _Units(NamedTuple):
    """What follows from a choice of units."""

    numel: int
    """Elements of all slots, if there are as few as possible."""
    slots: int
    """The fewest slots of a size class."""
    largest: nn.Module

    @classmethod
    def of(cls, model: nn.Module, units: Any) -> Self:
        plans = _plans(model, units)
        sizes = [(plan.module, sum(parameter.numel() for _, parameter, _ in plan.parameters)) for plan in plans]
        slots = LEAST_SLOTS + nesting(model, [plan.module for plan in plans])
        numel = sum(each.slot_bytes * each.slot_count for each in size_classes(sizes, lambda _: slots))
        return cls(numel, slots, max(sizes, key=itemgetter(1))[0])


def _names(model: nn.Module, units: Any) -> set[str]:
    """Return the names of the classes of all units but the root."""
    inside = (type(plan.module) for plan in _plans(model, units) if plan.module is not model)
    return {kind.__name__ for kind in inside if _may_be_named(kind)}


def _plans(model: nn.Module, units: Any) -> list[UnitPlan]:
    return assign_parameters(model, choose_units(model, planners_for(units)))


def _has_large_linear(outer: nn.Module) -> bool:
    return any(type(module) is nn.Linear and _numel(module) >= _WORTH * _numel(outer) for module in outer.modules())


def _classes_inside(outer: nn.Module) -> set[type[nn.Module]]:
    """Return the classes of the outermost modules inside a module that may be named, and hold enough of it."""
    least = _WORTH * _numel(outer)

    def below(module: nn.Module) -> Iterator[type[nn.Module]]:
        for child in module.children():
            if _may_be_named(type(child)):
                if _numel(child) >= least:
                    yield type(child)
            else:
                yield from below(child)

    return set(below(outer))


def _may_be_named(kind: type[nn.Module]) -> bool:
    return kind is nn.Embedding or not kind.__module__.startswith("torch.")


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

"""A table of a sharded model's units: their contents, their sizes, and which rank holds which elements."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

from torch import nn

from shardwise.engine.extensions.few_bits import BlockDtypes
from shardwise.engine.lookup import require_engine
from shardwise.fsdp.engine import Engine
from shardwise.fsdp.parameter_group import Group
from shardwise.fsdp.sharded_parameter import Placement
from shardwise.fsdp.strategy import SHORT_NAMES
from shardwise.fsdp.unit import Unit
from shardwise.tables import aligned

T = TypeVar("T")

ALIKE = 4
"""From this many on, units (or parameters of a unit) that differ only in the numbers in their names share one line."""


class Holding(NamedTuple):
    """One rank's part of a parameter: elements [start, stop) of it, flattened. With tensor parallelism, of the local
    tensor that this rank's shard group holds."""

    rank: int
    """Its position in the shard group."""
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ParameterPlace:
    """A parameter of a unit, with its dtypes and the ranks that hold it."""

    fqn: str
    shape: tuple[int, ...]
    """The global shape."""
    dtypes: str
    """Master/compute/reduce dtype, or one name if all three are equal; "frozen" is added if it requires no gradient."""
    _placement: Placement

    @property
    def holders(self) -> tuple[Holding, ...]:
        """The ranks that hold elements of it, in order, with these elements; the same in each replica."""
        layout, index = self._placement.layout, self._placement.index
        pieces = ((rank, layout.fragment(index, rank)) for rank in self.ranks)
        return tuple(Holding(rank, piece.start, piece.stop) for rank, piece in pieces)

    @property
    def ranks(self) -> range:
        """Positions of these ranks in the shard group; they are consecutive."""
        entry, slice_numel = self._placement.layout.entries[self._placement.index], self._placement.layout.shard_numel
        if not entry.numel:
            return range(0)
        return range(entry.start // slice_numel, (entry.stop - 1) // slice_numel + 1)


@dataclass(frozen=True, slots=True)
class UnitPlace:
    """A unit with its sizes. Bytes are those of one rank, the same on every rank. With tensor parallelism, elements and
    bytes are of the local tensors of this rank's shard group."""

    fqn: str
    """Name of its module in the model that was sharded; "" is that model itself."""
    module: str
    """Name of the module's class."""
    numel: int
    padding_numel: int
    """Elements between and after parameters that align the starts of parameters and of slices."""
    shard_bytes: int
    """Bytes of this rank's slices of the parameters."""
    gathered_bytes: int
    """Bytes of the unsharded unit: all parameters, in the compute dtype."""
    parameters: tuple[ParameterPlace, ...]


class Description(str):
    """The table of `describe` as text, with the data that it was made from."""

    __slots__ = ("units",)
    units: tuple[UnitPlace, ...]
    """The units, outermost first."""

    @classmethod
    def of(cls, text: str, units: tuple[UnitPlace, ...]) -> Self:
        """Return a description with this text and these units."""
        self = cls(text)
        self.units = units
        return self


def describe(model: nn.Module) -> Description:
    """Return a table of units (fqn, elements, padding, bytes on each rank, dtypes) and of which ranks hold which
    elements of each parameter. `print` it, or read `.units`. Does not communicate.

    Four or more units that differ only in the numbers in their names share one line; so do parameters inside a unit.
    """
    engine = require_engine(model)
    units = tuple(_unit(unit) for unit in engine.units)
    kinds = _alike(units, lambda unit: (_pattern(unit.fqn), *_looks(unit)))
    rows = [row for kind in kinds for row in ([kind] if len(kind) >= ALIKE else [[unit] for unit in kind])]
    head = ("unit", "module", "params", "numel", "padding", "shard bytes", "gathered bytes", "dtypes")
    table = aligned([head, *(_unit_row(row) for row in rows), _total(units)], right=range(2, 7))
    return Description.of("\n".join([_title(engine, units), *table, *_who_holds_what(engine, kinds)]), units)


# What there is ----------------------------------------------------------------------------------------------------


def _unit(unit: Unit) -> UnitPlace:
    numel = sum(group.layout.used_numel for group in unit.groups)
    return UnitPlace(
        unit.fqn,
        "+".join(type(module).__name__ for module in unit.modules),
        numel,
        sum(group.layout.numel for group in unit.groups) - numel,
        sum(group.shard_bytes for group in unit.groups),
        unit.parameters.unsharded_bytes,
        tuple(place for group in unit.groups for place in _parameters(group)),
    )


def _parameters(group: Group) -> Iterable[ParameterPlace]:
    dtypes = [group.dtypes.master, group.dtypes.compute, group.dtypes.reduce]
    names = "/".join(map(_short, dtypes if len(set(dtypes)) > 1 else dtypes[:1]))
    names = f"{group.dtypes.bits} of {names}" if isinstance(group.dtypes, BlockDtypes) else names
    for sharded in group.sharded:
        text = names if sharded.requires_grad else f"{names} frozen"
        yield ParameterPlace(sharded.fqn, sharded.placement.shape, text, sharded.placement)


def _short(dtype: object) -> str:
    name = str(dtype).removeprefix("torch.")
    return SHORT_NAMES.get(name, name)


# What is alike ----------------------------------------------------------------------------------------------------


def _alike(items: Sequence[T], look: Callable[[T], Hashable]) -> list[list[T]]:
    """Group items for which `look` gives the same value, in the order of their first ones."""
    found: dict[Hashable, list[T]] = {}
    for item in items:
        found.setdefault(look(item), []).append(item)
    return list(found.values())


def _pattern(fqn: str) -> str:
    return re.sub(r"\d+", "#", fqn)


def _looks(unit: UnitPlace) -> tuple[Any, ...]:
    sizes = unit.module, unit.numel, unit.padding_numel, unit.shard_bytes, unit.gathered_bytes
    return *sizes, tuple((_inside(p.fqn, unit), p.shape, p.dtypes, p.ranks) for p in unit.parameters)


def _parameter_looks(unit: UnitPlace, parameter: ParameterPlace) -> tuple[Any, ...]:
    return _pattern(_inside(parameter.fqn, unit)), parameter.shape, parameter.dtypes


def _inside(fqn: str, unit: UnitPlace) -> str:
    """Return a parameter's name relative to its unit's module."""
    return fqn.removeprefix(f"{unit.fqn}.")


def _span(names: Sequence[str]) -> str:
    """Return one name for many: `a.0.b`, ..., `a.31.b` -> `a.0…31.b`; if several numbers differ, `first … last`."""
    first, last = names[0], names[-1]
    if first == last:
        return first
    ours, theirs = re.split(r"(\d+)", first), re.split(r"(\d+)", last)
    different = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    if len(different) > 1:
        return f"{first} … {last}"
    ours[different[0]] += f"…{theirs[different[0]]}"
    return "".join(ours)


# Lines ------------------------------------------------------------------------------------------------------------


def _tensor_axes(engine: Engine) -> str:
    groups = [group for unit in engine.units for group in unit.groups if group.axes]
    axes = next((group.axes for group in groups if group.mesh is None), ())
    experts = next((group.axes for group in groups if group.mesh is not None), ())
    tensor = "".join(f" x tp={axis.world_size}" for axis in axes)
    return tensor + "".join(f", experts over ep={axis.world_size}" for axis in experts)


def _title(engine: Engine, units: Sequence[UnitPlace]) -> str:
    numel = sum(unit.numel for unit in units)
    return (
        f"{type(engine.root.module).__name__}: {numel:,} parameters in {len(units)} units, "
        f"{engine.strategy.value}, {engine.mesh.describe()}{_tensor_axes(engine)}, slots={engine.slots}"
    )


def _unit_row(alike: Sequence[UnitPlace]) -> tuple[str, ...]:
    unit = alike[0]
    name = _span([unit.fqn for unit in alike]) or "(root)"
    return (
        name if len(alike) == 1 else f"{name} (each of {len(alike)})",
        unit.module,
        *_numbers(unit.parameters, unit.numel, unit.padding_numel, unit.shard_bytes, unit.gathered_bytes),
        ", ".join(dict.fromkeys(parameter.dtypes for parameter in unit.parameters)),
    )


def _total(units: Sequence[UnitPlace]) -> tuple[str, ...]:
    every = [parameter for unit in units for parameter in unit.parameters]
    sizes = ((unit.numel, unit.padding_numel, unit.shard_bytes, unit.gathered_bytes) for unit in units)
    return ("all", "", *_numbers(every, *map(sum, zip(*sizes, strict=True))), "")


def _numbers(parameters: Sequence[ParameterPlace], *sizes: int) -> tuple[str, ...]:
    return str(len(parameters)), *(f"{size:,}" for size in sizes)


def _who_holds_what(engine: Engine, kinds: Sequence[Sequence[UnitPlace]]) -> list[str]:
    ranks = engine.mesh.shard.world_size
    each = f", in each of {engine.mesh.replicate.world_size} replicas" if engine.mesh.replicate.world_size > 1 else ""
    meshes = {unit.fqn: unit.mesh for unit in engine.units}
    all_but = "" if all(mesh is engine.mesh for mesh in meshes.values()) else ", of the experts its own"
    who = f"who holds what: ranks 0-{ranks - 1} of the shard group{each}"
    lines = [who if ranks > 1 else f"every rank holds all{all_but}"]
    for kind in kinds if ranks > 1 else ():
        name, own = _span([unit.fqn for unit in kind]) or "(root)", meshes[kind[0].fqn].shard.world_size
        over = "" if own == ranks else f", of the {own} with the same experts" if own > 1 else ", each its own experts"
        lines.append(f"  unit {name}" + (f" (each of {len(kind)})" if len(kind) > 1 else "") + over)
        unit = kind[0]
        several = _alike(unit.parameters, partial(_parameter_looks, unit))
        rows = [row for group in several for row in ([group] if len(group) >= ALIKE else [[p] for p in group])]
        table = aligned([_parameter_row(unit, row) for row in rows], right=())
        lines += [f"    {line}" for line in table]
    return lines


def _parameter_row(unit: UnitPlace, alike: Sequence[ParameterPlace]) -> tuple[str, ...]:
    first, last = alike[0], alike[-1]
    name = _span([_inside(parameter.fqn, unit) for parameter in alike])
    shape = " x ".join(map(str, first.shape)) or "0-d"
    if len(alike) > 1:
        return name, f"{len(alike)} times {shape}", first.dtypes, _ranks(range(first.ranks.start, last.ranks.stop))
    if 1 < len(first.ranks) <= 2:
        return name, shape, first.dtypes, ", ".join(f"{r} [{a:,}:{b:,}]" for r, a, b in first.holders)
    return name, shape, first.dtypes, _ranks(first.ranks)


def _ranks(ranks: range) -> str:
    if not ranks:
        return "no elements"
    return str(ranks.start) if len(ranks) == 1 else f"{ranks.start}-{ranks[-1]}"

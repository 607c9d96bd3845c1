"""`shard` on an ancestor of sharded modules: the new engine adopts their units, which keep their settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.engine.checked import CheckedEngine
from shardwise.engine.extensions.custom_reduction import forget_dropped
from shardwise.engine.lookup import take_engine
from shardwise.engine.setup.copying import refuse_to_copy
from shardwise.engine.setup.planners import Blocks
from shardwise.errors import UsageError
from shardwise.fsdp.collectives import Collectives
from shardwise.fsdp.mesh import Mesh, build_mesh, spans_of
from shardwise.fsdp.shard import Seams, UnitPlan
from shardwise.fsdp.strategy import Precision, Strategy
from shardwise.fsdp.unit import Unit

T = TypeVar("T")


class Adoption:
    """The units below one module that is being sharded."""

    def __init__(self, model: nn.Module, below: Mapping[str, CheckedEngine]) -> None:
        """`below`: the engines of the modules that were sharded before, by the modules' names."""
        self.model = model
        self.below = below
        self.units: list[Unit] = []

    def settle(
        self,
        strategy: Strategy,
        mesh: DeviceMesh | Mesh | None,
        precision: Precision | None,
        resharding: bool | int | None,
        align: int | None,
    ) -> tuple[Mesh, Precision, bool | int, int]:
        """Return the mesh of all units, and the precision, resharding and alignment of those that the call makes: what
        the call leaves out is taken from the engines below. Every rank must call this.

        Raises UsageError if those have another strategy or mesh, if they differ in what the call leaves out, if units
        would reshard to groups of two sizes, inside `sw.unsharded`, or if gradients below wait to be reduced.
        """
        engines = self.below.items()
        spans = None if mesh is None else spans_of(strategy, mesh)
        for fqn, engine in engines:
            _check_same("strategy", strategy.value, engine.strategy.value, fqn)
            spans = engine.mesh.spans if spans is None else spans
            _check_same("mesh", spans, engine.mesh.spans, fqn)
        if precision is None:
            theirs = _theirs("precision", {fqn: engine.precision for fqn, engine in engines}, _of_units)
            precision = replace(theirs, keep=())  # its patterns are for modules below
        if resharding is None:
            resharding = _theirs("reshard_after_forward", {fqn: engine.resharding for fqn, engine in engines})
        size = None if isinstance(resharding, bool) else resharding
        common = size
        for fqn, engine in engines:
            common = common or engine.mesh.secondary_size
            _check_same("reshard_after_forward", common, engine.mesh.secondary_size or common, fqn)
        if align is None:
            align = _theirs("align", {fqn: engine.align for fqn, engine in engines})
        _clear_up(self.below.values())
        self.units = _units_of(self.model, self.below)
        groups = _common_mesh(self.below.values(), resharding) or build_mesh(strategy, mesh, size, None)
        for fqn, engine in engines:
            _check_same("mesh", groups.spans, engine.mesh.spans, fqn)
        return groups, precision, resharding, align

    def join(self, seams: Seams) -> None:
        """Have the engine that is built with these seams take the units over."""
        seams.reviews.append(self._take_over)
        seams.settled = {module for fqn in self.below for module in self.model.get_submodule(fqn).modules()}
        seams.arrange = self._arrange

    def _take_over(self, model: nn.Module, plans: Sequence[UnitPlan]) -> None:
        """Make the engines below give their units up. The last review, because it changes them."""
        for module in [model.get_submodule(fqn) for fqn in self.below]:
            engine = take_engine(module)
            refuse_to_copy(module)
            engine.release()
            for unit in engine.units:
                if not _is_needed(unit):
                    for handle in unit.handles:
                        handle.remove()

    def _arrange(self, own: list[Unit], mesh: Mesh) -> list[Unit]:
        """Return all units, outermost first, after giving each the units around it and, if adopted, its name in the
        model."""
        by_module: dict[int, list[Unit]] = {}
        for unit in (*own, *(unit for unit in self.units if _is_needed(unit))):
            for module in unit.modules:
                by_module.setdefault(id(module), []).append(unit)
        names = {module: fqn for fqn, module in self.model.named_modules()}
        ordered: dict[Unit, None] = {}

        def visit(module: nn.Module, around: tuple[Unit, ...]) -> None:
            for unit in by_module.pop(id(module), ()):
                if unit not in ordered:
                    if unit in self.units:
                        _rebase(unit, names, mesh.shard)
                    unit.ancestors = around
                ordered[unit] = None
                around = (*around, unit)
            for child in module.children():
                visit(child, around)

        visit(self.model, ())
        return list(ordered)


def _is_needed(unit: Unit) -> bool:
    """Whether an engine has anything to do for the unit if it is not the root."""
    return bool(unit.groups or unit.settings.inputs or unit.settings.output)


def _rebase(unit: Unit, names: Mapping[nn.Module, str], collectives: Collectives) -> None:
    """Move the unit to a model whose modules have these `names`, sharded over `collectives`. No communication."""
    unit.fqn = "+".join(names[module] for module in unit.modules)
    for group in unit.groups:
        group.collectives = collectives
        group.fqns = [f"{names[site.module]}.{site.name}".lstrip(".") for site, *_ in group.sites]
        entries = zip(group.layout.entries, group.fqns, strict=True)
        group.layout = replace(group.layout, entries=tuple(replace(entry, fqn=fqn) for entry, fqn in entries))
        for tensors in (group.sharded, group.gradients.by_parameter):
            for index, tensor in enumerate(tensors):
                tensor.placement = group.placement_of(index)
    unit.parameters.move_to(collectives)


def _check_same(name: str, asked: object, theirs: object, fqn: str) -> None:
    if asked != theirs:
        raise UsageError(
            f"sw.shard was given {name}={asked!r}, but {fqn!r} below was sharded with {theirs!r}, which its units "
            f"keep: give every sw.shard call of a model the same {name}"
        )


def _theirs(name: str, values: Mapping[str, T], compared: Callable[[T], object] = lambda value: value) -> T:
    """Return the value that all modules below were sharded with. Raises UsageError if they differ."""
    first = next(iter(values))
    for fqn, value in values.items():
        if compared(value) != compared(values[first]):
            raise UsageError(
                f"{first!r} below was sharded with {name}={compared(values[first])!r} and {fqn!r} with "
                f"{compared(value)!r}, which they keep: choose one for the rest with sw.shard({name}=...)"
            )
    return values[first]


def _of_units(precision: Precision) -> Precision:
    """Return the precision without the settings that concern only the module given to `shard`."""
    return Precision(param=precision.param, reduce=precision.reduce, master=precision.master, frozen=precision.frozen)


def _common_mesh(below: Iterable[CheckedEngine], resharding: bool | int) -> Mesh | None:
    """Return the mesh of an engine below, if possible one with a smaller group to reshard to. None if
    `resharding` asks for such a group and no engine has one."""
    meshes = [engine.mesh for engine in below]
    found = next((mesh for mesh in meshes if mesh.secondary_size is not None), None)
    wants_more = not isinstance(resharding, bool) and found is None
    return None if wants_more else found or meshes[0]


def _units_of(model: nn.Module, below: Mapping[str, CheckedEngine]) -> list[Unit]:
    """Return the units to be adopted. Raises UsageError if the model has only some of the modules of one unit."""
    units = [unit for engine in dict.fromkeys(below.values()) for unit in engine.units]
    here = set(model.modules())
    for unit in units:
        if unit.has_several and not here.issuperset(unit.modules):
            names = ", ".join(type(module).__name__ for module in unit.modules)
            where = "list" if isinstance(model, Blocks) else type(model).__name__
            raise UsageError(
                f"{names} were sharded together, but not all of them are in this {where}: shard a module around all of "
                "them"
            )
    return units


def _clear_up(engines: Iterable[CheckedEngine]) -> None:
    """Let modules hold their sharded parameters, whatever was interrupted.

    Raises UsageError inside `sw.unsharded`, and if gradients wait in slots that will be freed.
    """
    engines = list(engines)
    if any(engine.is_suspended for engine in engines):
        raise UsageError("sw.shard inside sw.unsharded of a model below: leave that first")
    for engine in engines:
        engine.clear_up()
    for unit in (unit for engine in engines for unit in engine.units):
        if forget_dropped(unit):
            raise UsageError(
                f"sw.shard while gradients below, of {unit}, from a backward inside sw.no_sync wait to be "
                "reduced: run a backward outside sw.no_sync first, or drop them with zero_grad()"
            )

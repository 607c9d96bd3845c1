"""Shards a module in place: what a plain model on a real device needs.

It chooses the modules that become units, and assigns each parameter to one. A unit's parameters are sorted into groups
by dtype and by whether they are trainable or frozen. Each unit cuts its parameters, of equal values on every rank, into
this rank's shards. An `Engine` hooks the modules. That ranks built the same model is trusted.

`Seams` holds what a call adds for other models, each member a list or a function that this file only calls: `sw.shard`
fills them (`engine/setup`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.fsdp.engine import Engine
from shardwise.fsdp.mesh import Mesh, build_mesh
from shardwise.fsdp.operations import watch
from shardwise.fsdp.parameter_group import Dtypes, Group, Original, Site
from shardwise.fsdp.sharded_parameter import SHARDED_ATTRIBUTE, ShardedParameter
from shardwise.fsdp.strategy import Precision, Strategy
from shardwise.fsdp.unit import Unit, UnitSettings

# Choosing units -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class UnitPlan:
    """A module that becomes a unit, and the parameters that the unit owns."""

    fqn: str
    module: nn.Module
    ancestors: tuple[UnitPlan, ...]
    """The units around it, outermost first."""
    parameters: list[Original] = field(default_factory=list)
    modules: list[nn.Module] = field(init=False)
    """The modules whose forwards use the parameters: the module itself, unless a review says otherwise."""

    def __post_init__(self) -> None:
        self.modules = [self.module]


Named = tuple[str, nn.Module]
"""A module inside the model, with its fully qualified name."""
Planner = Callable[[nn.Module, Sequence[Named]], Sequence[Named]]
"""Returns the modules inside a model that become units, given those that the planners before it chose."""

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Containers that are never called, so they are never units."""


def choose_units(model: nn.Module, planners: Sequence[Planner]) -> list[Named]:
    """Return the modules inside `model` that become units, in module order. The model itself always is one too."""
    chosen: Sequence[Named] = ()
    for planner in planners:
        chosen = planner(model, chosen)
    wanted = {id(module) for _, module in chosen}
    return modules_below(model, lambda fqn, module: id(module) in wanted)


def repeated_blocks(model: nn.Module, chosen: Sequence[Named]) -> Sequence[Named]:
    """Unless units are chosen already, choose the outermost children of ModuleLists and Sequentials whose class occurs
    there more than once."""
    if chosen:
        return chosen
    found: list[Named] = []
    for fqn, container in model.named_modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        children = [(name, child) for name, child in container.named_children() if has_parameters(child)]
        classes = Counter(type(child) for _, child in children)
        found += [
            (f"{fqn}.{name}" if fqn else name, child)
            for name, child in children
            if classes[type(child)] > 1 and not isinstance(child, CONTAINERS)
        ]
    return outermost(found)


def assign_parameters(model: nn.Module, chosen: Sequence[Named], skipped: Collection[int] = ()) -> list[UnitPlan]:
    """Assign every parameter to the innermost unit around it; a tied one to the innermost unit around all its places.

    Args:
        chosen: the units besides the model itself.
        skipped: `id`s of parameters that are left alone.

    Returns the units in module order, the model itself first. Other units without parameters are dropped.
    """
    plans: dict[int, UnitPlan] = {id(model): UnitPlan("", model, ())}
    users: dict[int, list[_Use]] = {}
    wanted = {id(module) for _, module in chosen}
    for fqn, module, enclosing in _walk("", model, (), wanted, plans):
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in skipped:
                path = f"{fqn}.{name}" if fqn else name
                users.setdefault(id(parameter), []).append(_Use(path, parameter, Site(module, name), enclosing))
    for uses in users.values():
        sites = {(id(use.site.module), use.site.name): use.site for use in uses}
        owner = _common([use.enclosing for use in uses])
        owner.parameters.append((uses[0].fqn, uses[0].parameter, tuple(sites.values())))
    kept = [plan for plan in plans.values() if plan.parameters or plan.module is model]
    for plan in kept:
        plan.ancestors = tuple(ancestor for ancestor in plan.ancestors if ancestor in kept)
    return kept


class _Use(NamedTuple):
    """A place in the module tree that holds a parameter, and the units enclosing it, outermost first."""

    fqn: str
    parameter: nn.Parameter
    site: Site
    enclosing: tuple[UnitPlan, ...]


def _walk(
    fqn: str, module: nn.Module, enclosing: tuple[UnitPlan, ...], wanted: set[int], plans: dict[int, UnitPlan]
) -> Iterator[tuple[str, nn.Module, tuple[UnitPlan, ...]]]:
    """Yield every place of every module, with the units enclosing it. Adds a plan when a wanted module is first met."""
    if id(module) in wanted and id(module) not in plans:
        plans[id(module)] = UnitPlan(fqn, module, enclosing)
    if id(module) in plans and plans[id(module)] not in enclosing:
        enclosing = (*enclosing, plans[id(module)])
    yield fqn, module, enclosing
    for name, child in module.named_children():
        yield from _walk(f"{fqn}.{name}" if fqn else name, child, enclosing, wanted, plans)


def _common(chains: Sequence[tuple[UnitPlan, ...]]) -> UnitPlan:
    """Return the innermost unit that is in every chain."""
    common = chains[0]
    for chain in chains[1:]:
        length = 0
        while length < min(len(common), len(chain)) and common[length] is chain[length]:
            length += 1
        common = common[:length]
    return common[-1]


def modules_below(model: nn.Module, wanted: Callable[[str, nn.Module], bool]) -> list[Named]:
    """Return the modules inside the model for which `wanted(fqn, module)` is true, in module order. No containers."""
    return [
        (fqn, module)
        for fqn, module in model.named_modules()
        if module is not model and not isinstance(module, CONTAINERS) and wanted(fqn, module)
    ]


def outermost(units: Sequence[Named]) -> list[Named]:
    """Return the units that are inside no earlier one, given in module order."""
    kept: list[Named] = []
    for fqn, module in units:
        if not any(fqn.startswith(f"{outer}.") for outer, _ in kept):
            kept.append((fqn, module))
    return kept


def has_parameters(module: nn.Module) -> bool:
    """Whether there is a parameter in the module or below it."""
    return next(module.parameters(), None) is not None


# Groups ---------------------------------------------------------------------------------------------------------------


class GroupKind(Protocol):
    """A kind of groups. Parameters of one kind with the same key, dtype and `requires_grad` share a group."""

    def key(self, fqn: str, parameter: nn.Parameter) -> Hashable:
        """Return the parameter's key; None if it is not of this kind."""

    def make(self, originals: Sequence[Original], engine: Engine) -> Group:
        """Make the group of these parameters, which have one key. Every rank must call this."""


def _groups(plan: UnitPlan, engine: Engine, kinds: Sequence[GroupKind]) -> list[Group]:
    """Make the groups of a unit. Each is in the order of the module tree."""
    sorted_: dict[Hashable, tuple[GroupKind, list[Original]]] = {}
    for original in plan.parameters:
        fqn, parameter, _ = original
        found = ((kind, kind.key(fqn, parameter)) for kind in kinds)
        kind, key = next((kind, key) for kind, key in found if key is not None)
        alike = id(kind), key, parameter.dtype, parameter.requires_grad
        sorted_.setdefault(alike, (kind, []))[1].append(original)
    return [kind.make(originals, engine) for kind, originals in sorted_.values()]


class PlainGroups:
    """Groups of numbers that are stored and gathered as they are, or cast. Takes every parameter."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision

    def key(self, fqn: str, parameter: nn.Parameter) -> bool:
        """Return whether the parameter is computed with in its master dtype, whatever `precision.param` says."""
        return self._precision.keeps(fqn)

    def make(self, originals: Sequence[Original], engine: Engine) -> Group:
        """Make a group."""
        return Group(originals, dtypes_of(originals[0], engine.precision), engine.mesh.shard, align=engine.align)


def dtypes_of(original: Original, precision: Precision) -> Dtypes:
    """Return the dtypes of a parameter, and of all that share its group. Integers have one."""
    fqn, parameter, _ = original
    stored = parameter.dtype
    if not stored.is_floating_point:
        return Dtypes(stored, stored, stored)

    def given(name: str | None, default: torch.dtype) -> torch.dtype:
        return default if name is None else getattr(torch, name)

    master = given(precision.master, stored) if parameter.requires_grad else stored
    compute = master if precision.keeps(fqn) else given(precision.param, master)
    return Dtypes(master, compute, given(precision.reduce, compute))


# Seams ----------------------------------------------------------------------------------------------------------------

Review = Callable[[nn.Module, Sequence[UnitPlan]], object]
"""Looks at the units that are about to be built, the root first, before anything is changed. Raises to refuse them, or
exchanges something in them."""
Planned = tuple[Unit, UnitPlan]
Materialiser = Callable[[nn.Module, Sequence[Planned], Engine], None]
"""Gives the parameters of all units their values, equal on every rank, and shards the units."""


def cut(model: nn.Module, units: Sequence[Planned], engine: Engine) -> None:
    """Shard units whose parameters have values already, equal on every rank."""
    for unit, _ in units:
        unit.shard_parameters(engine.mesh.device)


Agree = Callable[[Sequence[Unit], Sequence[tuple[str, Tensor]], Sequence[object], Mesh], object]
"""Raises on every rank if ranks laid out different units, have different buffers, or gave `shard` other settings. Every
rank must call it."""
Equalise = Callable[[Sequence[tuple[str, Tensor]], Mesh], object]
"""Makes full tensors, local copies, equal on every rank, in place. Every rank must call it."""


@dataclass
class Seams:
    """What a call of `shard` adds to it. By default, nothing."""

    planners: list[Planner] = field(default_factory=lambda: [repeated_blocks])
    ignored: Sequence[nn.Parameter] = ()
    """Parameters that are left alone, as sharded ones are."""
    reviews: list[Review] = field(default_factory=list)
    kinds: list[GroupKind] = field(default_factory=list)
    """Each takes its parameters from those that the ones before it left; the rest are in plain groups."""
    agree: Agree = lambda units, buffers, settings, mesh: None
    """Called before the first collective that depends on the model."""
    materialise: Materialiser = cut
    equalise: Equalise = lambda named, mesh: None
    """Called with the model's buffers."""
    engine: type[Engine] = Engine
    """The class of the model's engine."""
    settled: Collection[nn.Module] = ()
    """Modules whose buffers have the right dtype already."""
    arrange: Callable[[list[Unit], Mesh], list[Unit]] = lambda units, mesh: units
    """Returns the engine's units, outermost first, given those that were built."""


# Sharding -------------------------------------------------------------------------------------------------------------


def shard(  # noqa: PLR0913, PLR0917 - the settings of an engine, and the seams
    model: nn.Module,
    strategy: Strategy = Strategy.FULL_SHARD,
    mesh: DeviceMesh | Mesh | None = None,
    precision: Precision | None = None,
    resharding: bool | int | None = None,
    slots: int = 3,
    align: int = 1,
    seams: Seams | None = None,
) -> Engine:
    """Shard a model in place and return its engine, which its modules' hooks refer to. Every rank must call this.

    Args:
        model: a module with parameters that are not sharded yet.
        mesh: data axes only: 1 axis = shard, 2 axes = (replicate, shard). Default: all ranks.
        precision: dtypes. Default: everything as stored.
        resharding: whether units reshard after forward, or to groups of how many ranks. Default: as the strategy does.
        slots: gathered units per size class, at most.
        align: elements; each rank's piece of a parameter begins at a multiple of it.

    Raises:
        MeshError: ranks, mesh and strategy do not fit together.
    """
    watch()
    seams = seams or Seams()
    sharded = [parameter for parameter in model.parameters() if isinstance(parameter, ShardedParameter)]
    skipped = {id(parameter) for parameter in (*seams.ignored, *sharded)}
    plans = assign_parameters(model, choose_units(model, seams.planners), skipped)
    for review in seams.reviews:
        review(model, plans)
    resharding = strategy.reshards_after_forward if resharding is None else resharding
    mesh = build_mesh(strategy, mesh, None if isinstance(resharding, bool) else resharding, None)
    engine = seams.engine(mesh, strategy, precision or Precision(), slots, resharding, align)
    units = _build_units(model, plans, engine, seams)
    _prepare_buffers(model, engine, seams)
    plain = [parameter for parameter in model.parameters() if not isinstance(parameter, ShardedParameter)]
    engine.install(seams.arrange(units, mesh), model, [*seams.ignored, *plain])  # the materialiser may replace some
    return engine


def _build_units(model: nn.Module, plans: Sequence[UnitPlan], engine: Engine, seams: Seams) -> list[Unit]:
    """Build a unit for each plan and shard it."""
    mesh, precision, resharding = engine.mesh, engine.precision, engine.resharding
    originals = {fqn: parameter for plan in plans for fqn, parameter, _ in plan.parameters}
    kinds = (*seams.kinds, PlainGroups(precision))
    inner = UnitSettings(resharding)
    outer = UnitSettings(resharding, precision.param if precision.cast_inputs else None, precision.output)
    built: dict[int, Unit] = {}
    for plan in plans:
        ancestors = [built[id(ancestor)] for ancestor in plan.ancestors]
        settings = inner if built else outer
        built[id(plan)] = Unit(plan.fqn, plan.modules, _groups(plan, engine, kinds), ancestors, settings)
    units = list(built.values())
    settings_of_all = (engine.strategy, precision, engine.slots, resharding, engine.align)
    seams.agree(units, list(model.named_buffers()), settings_of_all, mesh)
    with torch.no_grad(), torch.inference_mode(False):
        seams.materialise(model, list(zip(units, plans, strict=True)), engine)
    for group in (group for unit in units for group in unit.groups):
        for sharded in group.sharded:  # holders of the original, such as optimizers, find the sharded one here
            setattr(originals[sharded.fqn], SHARDED_ATTRIBUTE, sharded)
    return units


@torch.no_grad()
@torch.inference_mode(False)
def _prepare_buffers(model: nn.Module, engine: Engine, seams: Seams) -> None:
    """Move buffers to the device, cast them if asked unless their module is settled, and make them equal on all ranks.
    Every rank must call this."""
    mesh, name = engine.mesh, engine.precision.buffers
    dtype = None if name is None else getattr(torch, name)
    moved: dict[Tensor, Tensor] = {}  # a buffer in two places stays one
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer not in moved:
                is_cast = dtype is not None and buffer.is_floating_point() and module not in seams.settled
                cast = dtype if is_cast else buffer.dtype
                moved[buffer] = buffer.to("meta" if buffer.is_meta else mesh.device, cast)
            if buffer is not None:
                module._buffers[name] = moved[buffer]
    real = [(name, buffer) for name, buffer in model.named_buffers() if buffer.numel() and not buffer.is_meta]
    seams.equalise(real, mesh)

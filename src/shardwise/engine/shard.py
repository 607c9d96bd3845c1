"""`shard`: the one call that turns an nn.Module into a sharded one, in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.engine.agreement import agree_on_layout, agree_on_values
from shardwise.engine.copying import copy_deeply, refuse_to_copy
from shardwise.engine.engine import Engine
from shardwise.engine.mesh import Mesh, build_mesh, spans_of
from shardwise.engine.module_methods import refuse_conversions, watch_state_dicts
from shardwise.engine.torch_patches import give_sharded_parameters, install
from shardwise.engine.units.group import Dtypes, Group
from shardwise.engine.units.unit import Unit
from shardwise.errors import ConfigError, LayoutError, UsageError
from shardwise.modules.admission import check_admissible
from shardwise.modules.deferred_init.materialize import materialize, on_meta
from shardwise.modules.late_parameters import LateParameters
from shardwise.modules.site import Site
from shardwise.modules.wrapping import UnitPlan, Units, assign_parameters, choose_units, nesting
from shardwise.policy.precision import Precision
from shardwise.policy.strategy import LEAST_SLOTS, Strategy
from shardwise.sharded.parameter import SHARDED_FACE, ShardedParameter, outer_face

M = TypeVar("M", bound=nn.Module)

_ENGINE = "_shardwise_engine"


def shard(  # noqa: PLR0913, PLR0917 - the promised signature
    model: M,
    strategy: Strategy | str = Strategy.FULL_SHARD,
    mesh: DeviceMesh | Mesh | None = None,
    units: Units = None,
    precision: Precision | None = None,
    reshard_after_forward: bool | int | None = None,
    slots: int = 3,
    ignored: Iterable[nn.Parameter] = (),
) -> M:
    """Shard a model's parameters, gradients and optimizer state over ranks. Every rank must call this.

    Args:
        model: on any device, the meta device included. Changed in place; fully qualified names stay.
        strategy: a `Strategy` or its lower-case name.
        mesh: data axes only: 1 axis = shard, 2 axes = (replicate, shard). Default: all ranks; for hybrid strategies
            one shard group per host.
        units: which modules become units. None = automatic (transformers' `_no_split_modules`, else repeated blocks of
            a ModuleList or Sequential; large embeddings and heads alone); module classes; an int = the least numel of
            a unit; a callable (fqn, module) -> bool. The rest belongs to the root.
        precision: dtypes of compute, reduction and masters. Default: everything as stored.
        reshard_after_forward: None = the strategy's; True or False; an int = re-shard to groups of so many ranks.
        slots: arena slots for gathered units per size class: how many units are gathered at once, at most.
        ignored: parameters left alone: neither moved, sharded nor reduced.

    Returns:
        The same module. Its parameters are now `ShardedParameter`s; build the optimizer from them.

    Raises:
        ConfigError: an argument cannot be used; `slots` are fewer than the nesting of units needs.
        MeshError: ranks, mesh and strategy do not fit together, or torchrun's ranks have no process group.
        LayoutError: the model has no parameters, or something that cannot be sharded: a tie to a parameter sharded
            before, two tensors over the same memory, a tensor subclass, TorchScript, a container that nobody calls.
        DifferentModelsError: ranks built different models.

    Ranks whose initial parameters or buffers differ get rank 0's, with a warning. A second call on an ancestor adopts
    the units below it with their strategy, mesh, precision and resharding: it may leave those out but the strategy, and
    asking for others is a UsageError. `slots` are the last call's.
    Source: ZeRO (arXiv:1910.02054), PyTorch FSDP (arXiv:2304.11277).
    """
    install()
    strategy = Strategy.parse(strategy)
    if isinstance(slots, bool) or not isinstance(slots, int) or slots < LEAST_SLOTS:
        raise ConfigError(f"slots={slots!r}: a number of slots is at least {LEAST_SLOTS}")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"sw.shard takes an nn.Module, not a {type(model).__name__}")
    if engine_of(model, below=False) is not None:
        raise UsageError("this module is sharded already; sw.shard it once, or shard an ancestor to adopt it")
    below = {fqn: engine for fqn, module in model.named_modules() if (engine := module.__dict__.get(_ENGINE))}
    precision, resharding = _settle(
        below, strategy, mesh, _checked_precision(precision), _checked_resharding(reshard_after_forward)
    )
    if any(engine.is_suspended for engine in below.values()):
        raise UsageError("sw.shard inside sw.unsharded of a model below: leave that first")
    for engine in below.values():
        engine.clear_up()  # else modules may hold what they compute with, and it would be sharded
    ignored = list(ignored)
    skipped = {id(parameter) for parameter in ignored}
    plans = assign_parameters(
        model, choose_units(model, units), lambda p: id(p) in skipped or isinstance(p, ShardedParameter)
    )
    check_admissible(model, plans)
    if not below and not any(plan.parameters for plan in plans):
        theirs = [p.fqn for p in model.parameters() if isinstance(p, ShardedParameter)]
        why = (
            f"is sharded already, in the model that calls its parameter {theirs[0]!r}"
            if theirs
            else "has no parameters"
        )
        raise LayoutError(f"{type(model).__name__} {why}: nothing to shard")
    old = [unit for engine in below.values() for unit in engine.units]
    least = LEAST_SLOTS + nesting(model, [*(plan.module for plan in plans), *(unit.module for unit in old)])
    if slots < least and resharding:
        raise ConfigError(f"slots={slots} is fewer than this model's nesting of units needs: at least {least}")
    adopted = [_take_over(model.get_submodule(fqn)) for fqn in below]
    secondary = None if isinstance(resharding, bool) else resharding
    groups = adopted[0].mesh if adopted else build_mesh(strategy, mesh, secondary, None)
    engine = Engine(groups, strategy, precision, slots, keeps_params=not resharding)
    own = _build_units(model, plans, groups, precision, (strategy, precision, slots, resharding))
    plain = [parameter for parameter in model.parameters() if not isinstance(parameter, ShardedParameter)]
    late = LateParameters(model, [*ignored, *plain])  # of those on the meta device others stand there now
    engine.install(_in_module_order(model, own, old, groups), late)
    _take_charge(model, engine)
    give_sharded_parameters()
    return model


def _take_charge(model: nn.Module, engine: Engine) -> None:
    """From here on `engine` serves `model`."""
    model.__dict__[_ENGINE] = engine
    for unit in engine.units:
        refuse_conversions(unit.module)
    watch_state_dicts(model)
    copy_deeply(model, engine, _take_charge)


def engine_of(model: nn.Module, below: bool = True) -> Engine | None:
    """The engine that `shard` gave the module; with `below`, or else the one that a module below it has."""
    for module in model.modules() if below else (model,):
        engine: Engine | None = module.__dict__.get(_ENGINE)
        if engine is not None:
            return engine
    return None


def engines_below(model: nn.Module) -> list[Engine]:
    """Of every sharded model at or below the module, in module order. Raises UsageError if there is none."""
    engines = [engine for module in model.modules() if (engine := module.__dict__.get(_ENGINE))]
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


def require_engine(model: nn.Module) -> Engine:
    """As `engine_of`. Raises UsageError if there is none."""
    engine = engine_of(model)
    if engine is None:
        raise _not_sharded(model)
    return engine


def _not_sharded(model: nn.Module) -> UsageError:
    return UsageError(f"{type(model).__name__} is not sharded; call sw.shard(model, ...) first")


def _checked_precision(precision: Precision | None) -> Precision | None:
    if precision is not None and not isinstance(precision, Precision):
        raise ConfigError(f"precision={precision!r}: pass sw.Precision(param=..., reduce=...)")
    return precision


def _checked_resharding(asked: bool | int | None) -> bool | int | None:
    """A group of one rank is no resharding."""
    if asked is None or isinstance(asked, bool):
        return asked
    if asked < 1:
        raise ConfigError(f"reshard_after_forward={asked!r}: None, True, False or a number of ranks")
    return False if asked == 1 else asked


def _settle(
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


def _take_over(module: nn.Module) -> Engine:
    """The module's engine, which has given up its units to the one that is being made."""
    engine: Engine = module.__dict__.pop(_ENGINE)
    refuse_to_copy(module)
    engine.hand_over()
    return engine


def _build_units(
    model: nn.Module, plans: list[UnitPlan], mesh: Mesh, precision: Precision, settings: Sequence[object]
) -> list[tuple[Unit, UnitPlan]]:
    units = [(Unit(plan.fqn, plan.module, _groups(plan, mesh, precision)), plan) for plan in plans]
    given = {fqn: parameter for plan in plans for fqn, parameter, _ in plan.parameters}
    agree_on_layout([unit for unit, _ in units], list(model.named_buffers()), settings, mesh)
    with torch.no_grad(), torch.inference_mode(False):
        if on_meta(model):
            _materialize(model, units, plans, mesh, precision)
        else:
            for unit, plan in units:
                agree_on_values([(fqn, parameter) for fqn, parameter, _ in plan.parameters], mesh)
                unit.shard_parameters(mesh.device)
        _prepare_buffers(model, mesh, precision)
    for group in (group for unit, _ in units for group in unit.groups):
        for sharded in group.sharded:  # those who hold the original, such as optimizers, find the sharded one by it
            setattr(given[sharded.fqn], SHARDED_FACE, sharded)
    return units


def _materialize(
    model: nn.Module, units: Sequence[tuple[Unit, UnitPlan]], plans: list[UnitPlan], mesh: Mesh, precision: Precision
) -> None:
    by_plan = {id(plan): unit for unit, plan in units}

    def finish(plan: UnitPlan) -> None:
        unit = by_plan[id(plan)]
        replaced = {fqn: parameter for fqn, parameter, _ in plan.parameters}
        for group in unit.groups:
            group.replace_originals(replaced)
        unit.shard_parameters(mesh.device)

    real = [(fqn, parameter) for plan in plans for fqn, parameter, _ in plan.parameters if not parameter.is_meta]
    agree_on_values(real, mesh)
    with _SameRandomState(mesh):
        materialize(model, plans, mesh.device, finish)
    for unit, plan in units:
        if not plan.parameters:
            unit.shard_parameters(mesh.device)


class _SameRandomState:
    """Rank 0's random state on every rank; afterwards other ranks have their own back."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def __enter__(self) -> None:
        self._shared = self._mesh.is_dry
        if self._shared:  # alone; and a random state is a real tensor, whatever mode makes the others fake
            return
        self._before = torch.get_rng_state()
        state = self._before.to(self._mesh.device)
        self._mesh.replicate.broadcast(state, 0)
        self._mesh.shard.broadcast(state, 0)
        torch.set_rng_state(state.cpu())
        self._shared = bool(torch.equal(state.cpu(), self._before))

    def __exit__(self, *exception: object) -> None:
        if not self._shared:
            torch.set_rng_state(self._before)


def _groups(plan: UnitPlan, mesh: Mesh, precision: Precision) -> list[Group]:
    """Parameters by (stored dtype, trainable), each in the order of the module tree."""
    kinds: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter, tuple[Site, ...]]]] = {}
    for item in plan.parameters:
        kinds.setdefault((item[1].dtype, item[1].requires_grad), []).append(item)
    return [
        Group(items, _dtypes(dtype, trainable, precision), mesh.shard) for (dtype, trainable), items in kinds.items()
    ]


def _dtypes(stored: torch.dtype, trainable: bool, precision: Precision) -> Dtypes:
    if not stored.is_floating_point:
        return Dtypes(stored, stored, stored)

    def given(name: str | None, default: torch.dtype) -> torch.dtype:
        return default if name is None else getattr(torch, name)

    master = given(precision.master, stored) if trainable else stored
    compute = given(precision.param, master)
    return Dtypes(master, compute, given(precision.reduce, compute))


def _prepare_buffers(model: nn.Module, mesh: Mesh, precision: Precision) -> None:
    """Move buffers to the device, cast them if asked, and have rank 0's everywhere."""
    dtype = None if precision.buffers is None else getattr(torch, precision.buffers)
    moved: dict[torch.Tensor, torch.Tensor] = {}  # a buffer in two places stays one
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer not in moved:
                cast = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
                moved[buffer] = buffer.to(mesh.device, cast)
            if buffer is not None:
                module._buffers[name] = moved[buffer]
    agree_on_values([(name, buffer) for name, buffer in model.named_buffers() if buffer.numel()], mesh)


def _in_module_order(
    model: nn.Module, own: Sequence[tuple[Unit, UnitPlan]], adopted: Sequence[Unit], mesh: Mesh
) -> list[Unit]:
    """All units, outermost first, each knowing those around it and its name from `model`."""
    by_module: dict[int, list[Unit]] = {}
    for unit in (*(unit for unit, _ in own), *(unit for unit in adopted if unit.groups)):
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

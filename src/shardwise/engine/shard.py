"""`shard`: the one call that turns an nn.Module into a sharded one, in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.engine.adoption import check_mesh, clear_up, common_mesh, in_module_order, settle, take_over
from shardwise.engine.building import build_units, prepare_buffers
from shardwise.engine.copying import copy_deeply
from shardwise.engine.engine import Engine
from shardwise.engine.lookup import engine_of, engines_by_name, set_engine
from shardwise.engine.mesh import Mesh, build_mesh
from shardwise.engine.module_methods import refuse_conversions, watch_state_dicts
from shardwise.engine.torch_patches import give_sharded_parameters, install
from shardwise.errors import ConfigError, LayoutError, UsageError
from shardwise.modules.admission import check_admissible
from shardwise.modules.late_parameters import LateParameters
from shardwise.modules.wrapping import UnitPlan, Units, assign_parameters, choose_units, nesting
from shardwise.policy.precision import Precision
from shardwise.policy.strategy import LEAST_SLOTS, Strategy
from shardwise.sharded.parameter import ShardedParameter

M = TypeVar("M", bound=nn.Module)


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
    the units below it, which keep their precision and resharding: the inputs and outputs of the module that was given
    to the first call go on being cast. What the second call leaves out it has from them, unless they differ. Strategy
    and mesh are one for all. `slots` are the last call's.
    Source: ZeRO (arXiv:1910.02054), PyTorch FSDP (arXiv:2304.11277).
    """
    install()
    strategy = Strategy.parse(strategy)
    _check(model, slots)
    below = engines_by_name(model)
    precision, resharding = settle(
        below, strategy, mesh, _checked_precision(precision), _checked_resharding(reshard_after_forward)
    )
    clear_up(below.values())
    ignored = list(ignored)
    plans = _plans(model, units, ignored, bool(below))
    old = [unit for engine in below.values() for unit in engine.units]
    if resharding is not False or any(not unit.keeps_params for unit in old):
        _check_nesting(model, slots, [*(plan.module for plan in plans), *(unit.module for unit in old)])
    settled = {module for fqn in below for module in model.get_submodule(fqn).modules()}
    groups = common_mesh(below.values(), resharding) or build_mesh(strategy, mesh, _group_size(resharding), None)
    check_mesh(below, groups)
    for fqn in below:
        take_over(model.get_submodule(fqn))
    engine = Engine(groups, strategy, precision, slots, resharding)
    own = build_units(model, plans, groups, precision, resharding, (strategy, precision, slots, resharding))
    prepare_buffers(model, groups, precision, settled)
    plain = [parameter for parameter in model.parameters() if not isinstance(parameter, ShardedParameter)]
    late = LateParameters(model, [*ignored, *plain])  # of those on the meta device others stand there now
    engine.install(in_module_order(model, own, old, groups), late)
    _put_in_charge(model, engine)
    give_sharded_parameters()
    return model


def _put_in_charge(model: nn.Module, engine: Engine) -> None:
    """From here on `engine` serves `model`."""
    set_engine(model, engine)
    for unit in engine.units:
        refuse_conversions(unit.module)
    watch_state_dicts(model)
    copy_deeply(model, engine, _put_in_charge)


def _check(model: object, slots: object) -> None:
    if isinstance(slots, bool) or not isinstance(slots, int) or slots < LEAST_SLOTS:
        raise ConfigError(f"slots={slots!r}: a number of slots is at least {LEAST_SLOTS}")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"sw.shard takes an nn.Module, not a {type(model).__name__}")
    if engine_of(model, below=False) is not None:
        raise UsageError("this module is sharded already; sw.shard it once, or shard an ancestor to adopt it")


def _plans(model: nn.Module, units: Units, ignored: Sequence[nn.Parameter], adopts: bool) -> list[UnitPlan]:
    """Which unit each parameter goes to. Raises LayoutError if one cannot be sharded or there is nothing to shard."""
    skipped = {id(parameter) for parameter in ignored}
    plans = assign_parameters(
        model, choose_units(model, units), lambda p: id(p) in skipped or isinstance(p, ShardedParameter)
    )
    check_admissible(model, plans)
    if not adopts and not any(plan.parameters for plan in plans):
        theirs = [p.fqn for p in model.parameters() if isinstance(p, ShardedParameter)]
        why = (
            f"is sharded already, in the model that calls its parameter {theirs[0]!r}"
            if theirs
            else "has no parameters"
        )
        raise LayoutError(f"{type(model).__name__} {why}: nothing to shard")
    return plans


def _check_nesting(model: nn.Module, slots: int, unit_modules: Sequence[nn.Module]) -> None:
    least = LEAST_SLOTS + nesting(model, unit_modules)
    if slots < least:
        raise ConfigError(f"slots={slots} is fewer than this model's nesting of units needs: at least {least}")


def _checked_precision(precision: Precision | None) -> Precision | None:
    if precision is not None and not isinstance(precision, Precision):
        raise ConfigError(f"precision={precision!r}: pass sw.Precision(param=..., reduce=...)")
    return precision


def _group_size(resharding: bool | int) -> int | None:
    return None if isinstance(resharding, bool) else resharding


def _checked_resharding(asked: bool | int | None) -> bool | int | None:
    """A group of one rank is no resharding."""
    if asked is None or isinstance(asked, bool):
        return asked
    if asked < 1:
        raise ConfigError(f"reshard_after_forward={asked!r}: None, True, False or a number of ranks")
    return False if asked == 1 else asked

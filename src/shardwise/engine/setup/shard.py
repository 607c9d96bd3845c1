"""`shard`: the one call that turns an nn.Module into a sharded one, in place.

It reads the arguments, fills the seams of `fsdp/shard.py` with what the arguments and the model ask for, and
adapts the module's own methods afterwards. What a plain model does not need is imported when it is needed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.engine.checked import CheckedEngine
from shardwise.engine.lookup import engine_of, engines_by_name, set_engine
from shardwise.engine.setup.admission import check_admissible, check_undivided
from shardwise.engine.setup.agreement import agree_on_layout, agree_on_values, cut_equal
from shardwise.engine.setup.copying import copy_deeply
from shardwise.engine.setup.mesh_axes import EXPERTS, Axes, DividedMesh
from shardwise.engine.setup.module_methods import refuse_conversions, tell_transformers, watch_state_dicts
from shardwise.engine.setup.planners import Blocks, GroupedUnit, Units, nesting, planners_for
from shardwise.engine.setup.torch_patches import install
from shardwise.errors import ConfigError, LayoutError, MeshError, UsageError
from shardwise.fsdp import shard as shard_core
from shardwise.fsdp.mesh import Mesh
from shardwise.fsdp.shard import Seams, UnitPlan
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.fsdp.strategy import LEAST_SLOTS, Precision, Strategy
from shardwise.fsdp.unit import Unit
from shardwise.modules.extended import is_tensor_parallel
from shardwise.policy.checks import check_count, checked_align, checked_precision, checked_resharding
from shardwise.policy.offload import Offload
from shardwise.policy.strategies import strategy_of
from shardwise.suggest import did_you_mean

if TYPE_CHECKING:
    from shardwise.engine.setup.group_kinds import ExtendedGroups
    from shardwise.engine.setup.offloading import OffloadedGroups
    from shardwise.engine.setup.tensor_parallel import TensorParallelGroups, TensorPlan

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])


def shard(  # noqa: PLR0913, PLR0917 - the promised signature
    model: M,
    strategy: Strategy | str = Strategy.FULL_SHARD,
    mesh: DeviceMesh | Mesh | None = None,
    units: Units = None,
    precision: Precision | None = None,
    reshard_after_forward: bool | int | None = None,
    slots: int = 3,
    ignored: Iterable[nn.Parameter] = (),
    offload: Offload | None = None,
    align: int | None = None,
    tp_plan: TensorPlan | None = None,
) -> M:
    """Shard a model's parameters, gradients and optimizer state over ranks. Every rank must call this.

    Args:
        model: on any device, the meta device included. Changed in place; fully qualified names stay. Or a sequence of
            modules, none inside another, which become one unit. If they are called one after another, the unit stays
            gathered from the first one's call to the last one's. Call `shard` on a module around them after that.
        strategy: a `Strategy`, its lower-case name, or the field's ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp").
        mesh: data axes: 1 axis = shard, 2 axes = (replicate, shard); or axes by the names of `sw.mesh`, of which "tp"
            is the one that `tp_plan` is for, and "cp" divides sequences (`sw.sequence_slice`). Default: all ranks; for
            hybrid strategies one shard group per host.
        units: which modules become units. None = automatic (transformers' `_no_split_modules`, else repeated blocks of
            a ModuleList or Sequential; large embeddings and heads alone); module classes; an int = the least numel of
            a unit; a callable (fqn, module) -> bool; "transformers" = the model's own `fsdp_plan`. The rest belongs to
            the root. None for several modules.
        precision: dtypes of compute, reduction and masters. Default: everything as stored.
        reshard_after_forward: None = as the strategy does; True or False; an int = reshard to groups of so many ranks.
        slots: arena slots for gathered units per size class: how many units are gathered at once, at most.
        ignored: parameters left alone: neither moved, sharded nor reduced.
        offload: where shards of these units, their reduced gradients and their optimizer state rest between uses. They
            are loaded from host memory or disk through rings of buffers, unit by unit: shards before their unit's
            forward and backward, and all three in `optimizer.step()` of any elementwise optimizer.
        align: elements. Every rank's piece of a parameter begins at a multiple of it, so that blocks of so many are
            never cut: `sw.optim.AdamW8bit.BLOCK_NUMEL` for that optimizer. Costs less than `align` elements of padding
            for each parameter and each slice.
        tp_plan: makes the model tensor-parallel over the mesh's axis "tp" first. "auto" = a transformers model's own
            plan; or styles by patterns of module names: transformers' by name ("colwise"), or torch's `ParallelStyle`s.
            Ranks of one tp group must be given the same batches. A model whose parameters are DTensors on such an axis
            already needs none.

    Returns:
        The same module, or sequence. Its parameters are now `ShardedParameter`s; build the optimizer from them.

    Raises:
        ConfigError: an argument cannot be used; `precision.frozen` is given and no linear layer is frozen; `slots` are
            fewer than the nesting of units needs.
        MeshError: ranks, mesh and strategy do not fit together, or torchrun's ranks have no process group.
        LayoutError: every parameter is ignored or sharded already, or there is something that cannot be sharded: a tie
            to a parameter sharded before, two tensors over the same memory, a tensor subclass, TorchScript, a container
            that nobody calls.
        DifferentModelsError: ranks built different models.
        UsageError: the module is sharded already, or modules below it were sharded with settings that do not fit.

    A module without parameters is returned unchanged, for scripts that shard modules one by one.

    Ranks whose initial parameters or buffers differ get rank 0's, with a warning. A second call on an ancestor adopts
    the units below it, which keep their precision and resharding: the inputs and outputs of the module that was given
    to the first call are still cast. Arguments that the second call leaves out are taken from those units, which must
    not differ in them. Strategy and mesh must be the same for all. `slots` are those of the last call. A call with a
    list of modules that are sharded already makes one model of them: blocks without a root, which then share slots and
    one recorded order.
    Source: ZeRO (arXiv:1910.02054), PyTorch FSDP (arXiv:2304.11277).
    """
    install()
    strategy = strategy_of(strategy)
    tree = _checked_tree(model, slots, units)
    if next(tree.parameters(), None) is None:
        return model
    ignored, offload = _checked_ignored(ignored), _checked_offload(offload)
    precision, align = checked_precision(precision), checked_align(align)
    resharding = checked_resharding(reshard_after_forward)
    _check_alone(mesh)
    mesh, over_tensor_axis, experts = _divided(tree, mesh, strategy, tp_plan)
    adoption, below = None, engines_by_name(tree)
    if below:
        from shardwise.engine.setup.adoption import Adoption

        adoption = Adoption(tree, below)
        mesh, precision, resharding, align = adoption.settle(strategy, mesh, precision, resharding, align)
    precision = precision or Precision()
    resharding = strategy.reshards_after_forward if resharding is None else resharding
    seams = _seams(tree, units, ignored, precision, offload, adopts=adoption is not None)
    old = [] if adoption is None else adoption.units
    if resharding is not False or any(unit.reshards_after_forward for unit in old):
        seams.reviews.append(partial(_check_nesting, slots, old))
    if experts is not None:
        from shardwise.engine.setup.experts import divide

        divide(seams, experts, precision, resharding)
    if adoption is not None:
        adoption.join(seams)
    with over_tensor_axis:
        engine = shard_core.shard(tree, strategy, mesh, precision, resharding, slots, align or 1, seams)
    assert isinstance(engine, CheckedEngine)
    for module in [model] if isinstance(model, nn.Module) else model:
        _put_in_charge(module, engine)
    return model


def _check_alone(mesh: object) -> None:
    """Raise MeshError if a launcher started several ranks: without a process group each would train a model of its
    own."""
    if mesh is not None or (dist.is_available() and dist.is_initialized()):
        return
    rank, ranks = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "")
    if rank is not None and ranks.isdecimal() and int(ranks) > 1:
        raise MeshError(
            f"RANK={rank} and WORLD_SIZE={ranks} are set, as torchrun sets them, but there is no process group, so "
            f"each of the {ranks} ranks would train a model of its own: call "
            "torch.distributed.init_process_group(...) before sw.shard (or unset WORLD_SIZE, if that is what you want)"
        )


def _divided(
    model: nn.Module, mesh: DeviceMesh | Mesh | None, strategy: Strategy, plan: TensorPlan | None
) -> tuple[DeviceMesh | Mesh | None, AbstractContextManager[None], Mesh | None]:
    """Make the model tensor-parallel if there is a plan, let it attend across slices of sequences, and divide its
    experts. Returns the data axes of the mesh, a context to shard the model in, and the ranks that hold the same
    experts, if these are divided."""
    if not isinstance(mesh, DividedMesh):
        check_undivided(model)
    axes = Axes.of(mesh, strategy) if isinstance(mesh, DeviceMesh) else None
    tensor = None if axes is None else axes.tensor
    if plan is not None and tensor is None:
        raise ConfigError("tp_plan needs a mesh with an axis 'tp': pass mesh=sw.mesh(tp=...)")
    over_tensor_axis: AbstractContextManager[None] = nullcontext()
    are_cut = any(map(is_tensor_parallel, model.parameters()))
    if are_cut or (tensor is not None and tensor.size() > 1):
        from shardwise.engine.setup.tensor_parallel import apply_plan, over_axis

        if tensor is not None and plan is not None:
            apply_plan(model, tensor, plan)
        elif not are_cut:
            raise ConfigError(
                f"the mesh has an axis 'tp', and nothing makes this {type(model).__name__} tensor-parallel: pass "
                "tp_plan='auto' (transformers' models) or a dict of styles, or leave the axis out"
            )
        over_tensor_axis = over_axis(model, tensor)
    if axes is not None and axes.context is not None:
        from shardwise.engine.setup.context_parallel import attend_across

        attend_across(model, axes.context)
    experts = mesh.same_experts if isinstance(mesh, DividedMesh) else None
    if axes is not None and axes.experts is not None:
        from shardwise.engine.setup.experts import apply_plan as divide_experts
        from shardwise.engine.setup.experts import same_experts

        assert tensor is not None, "sw.mesh makes all axes"
        if below := engines_by_name(model):
            raise UsageError(
                f"{next(iter(below))!r} is sharded already: with sw.mesh(ep=...), shard the whole model in one call"
            )
        divide_experts(model, axes.experts[EXPERTS], tensor)
        experts = same_experts(strategy, axes.experts)
    return (mesh if axes is None else axes.data), over_tensor_axis, experts


def _seams(
    model: nn.Module,
    units: Units,
    ignored: Sequence[nn.Parameter],
    precision: Precision,
    offload: Offload | None,
    adopts: bool,
) -> Seams:
    """Return what the arguments and the model ask of the core. `adopts`: some modules below are sharded already."""
    seams = Seams([], ignored, engine=CheckedEngine, agree=agree_on_layout, equalise=agree_on_values)
    seams.materialise = cut_equal
    if isinstance(model, GroupedUnit):
        seams.reviews.append(_make_one)
    elif not isinstance(model, Blocks):
        seams.planners += planners_for(units)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        from shardwise.engine.setup.materialisers import initialise

        seams.materialise = initialise
    offloaded = None
    if offload is not None:
        from shardwise.engine.setup.offloading import OffloadedGroups

        offloaded = OffloadedGroups(offload, precision)
        seams.materialise = offloaded.wrap(seams.materialise)
    _take_subclasses(seams, model, precision, offloaded)
    seams.reviews.append(check_admissible)
    if not adopts:
        seams.reviews.append(_check_anything)
    seams.reviews.append(partial(_check_kept, precision))
    if precision.frozen is not None:
        from shardwise.engine.setup.group_kinds import FewBitsGroups

        few_bits = FewBitsGroups(model, precision, offloaded)
        seams.kinds.append(few_bits)
        if not adopts:
            seams.reviews.append(few_bits.check)
    if offloaded is not None:
        seams.kinds.append(offloaded)
    return seams


def _take_subclasses(seams: Seams, model: nn.Module, precision: Precision, offloaded: OffloadedGroups | None) -> None:
    """Add the kinds of groups that tensor subclasses among the parameters need."""
    kinds: list[ExtendedGroups | TensorParallelGroups] = []
    if any(hasattr(parameter, "fsdp_pre_all_gather") for parameter in model.parameters()):
        from shardwise.engine.setup.group_kinds import ExtendedGroups

        kinds.append(ExtendedGroups(offloaded))
    if any(map(is_tensor_parallel, model.parameters())):
        from shardwise.engine.setup.tensor_parallel import TensorParallelGroups

        if offloaded is not None:
            raise ConfigError("offload of DTensors is not supported: leave offload out, or the axis 'tp' or 'ep'")
        if precision.frozen is not None:
            raise ConfigError(
                f"precision.frozen={precision.frozen!r} of DTensors is not supported: leave frozen out, or the axis "
                "'tp' or 'ep'"
            )
        kinds.append(TensorParallelGroups(precision))
    seams.kinds += kinds
    seams.reviews += [kind.stand_in for kind in kinds]


def _put_in_charge(model: nn.Module, engine: CheckedEngine) -> None:
    """Let `engine` serve `model` from now on."""
    set_engine(model, engine)
    for unit in engine.units:
        for own in unit.modules:
            refuse_conversions(own)
        for sharded in (sharded for group in unit.groups for sharded in group.sharded):
            if sharded.placement.replicas is not unit.mesh.replicate:
                sharded.placement = replace(sharded.placement, replicas=unit.mesh.replicate)
    watch_state_dicts(model)
    tell_transformers(model, engine)
    if "peft" in sys.modules:
        from shardwise.modules.adapters import watch_layers

        watch_layers(model, lambda: engine.runs_model)
    copy_deeply(model, engine, _put_in_charge)


def _checked_tree(model: object, slots: object, units: Units) -> nn.Module:
    """Return the module to shard, or a module that holds those to be sharded together."""
    check_count("slots", slots, LEAST_SLOTS)
    modules: list[nn.Module] = list(model) if isinstance(model, (list, tuple)) else [model]  # type: ignore[list-item]
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        raise ConfigError(f"sw.shard takes an nn.Module or a list of them, not a {type(model).__name__}")
    are_sharded = [engine_of(module, below=False) is not None for module in modules]
    if modules[0] is not model and units is None and all(are_sharded):
        return Blocks(modules)
    if any(are_sharded):
        raise UsageError("this module is sharded already; sw.shard it once, or shard an ancestor to adopt it")
    if modules[0] is model:
        return modules[0]
    inside = [id(below) for module in modules for below in module.modules()]
    if units is not None or any(inside.count(id(module)) > 1 for module in modules):
        raise ConfigError(
            "sw.shard of several modules makes one unit of them: leave units out, and pass modules that do not "
            "contain one another (to make a unit inside one of them, shard that first)"
        )
    return GroupedUnit(modules)


def _make_one(model: nn.Module, plans: Sequence[UnitPlan]) -> None:
    """Make one unit of all modules of a `GroupedUnit`."""
    plans[0].modules = list(model.children())


def _check_anything(model: nn.Module, plans: Sequence[UnitPlan]) -> None:
    """Raise LayoutError if there is nothing to shard."""
    if not any(plan.parameters for plan in plans):
        theirs = [p.fqn for p in model.parameters() if isinstance(p, ShardedParameter)]
        why = (
            f"is sharded already, in a model where its parameter is named {theirs[0]!r}"
            if theirs
            else "has no parameters except ignored ones"
        )
        raise LayoutError(f"{type(model).__name__} {why}: nothing to shard")


def _check_kept(precision: Precision, model: nn.Module, plans: Sequence[UnitPlan]) -> None:
    names = [fqn for plan in plans for fqn, _, _ in plan.parameters]
    for pattern in precision.keep:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"precision.keep: {pattern!r} matches no parameter of this {type(model).__name__} that the call shards"
                f"{did_you_mean(pattern, names)}"
            )


def _check_nesting(slots: int, old: Sequence[Unit], model: nn.Module, plans: Sequence[UnitPlan]) -> None:
    """Raise ConfigError if the units, with the `old` ones below, need more slots."""
    least = LEAST_SLOTS + nesting(model, [*(plan.module for plan in plans), *(m for unit in old for m in unit.modules)])
    if slots < least:
        raise ConfigError(f"slots={slots}: this model's nested units need at least {least}")


def _checked_offload(offload: Offload | None) -> Offload | None:
    if offload is not None and not isinstance(offload, Offload):
        raise ConfigError(f"offload={offload!r}: pass sw.Offload(params=..., optimizer=..., path=...)")
    return offload


def _checked_ignored(asked: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Raise ConfigError unless these are parameters: a name would match none, and its parameter would be sharded."""
    given: object = asked
    found: list[nn.Parameter] = [*asked] if not isinstance(given, str) else []
    wrong: list[object] = [given] if isinstance(given, str) else [one for one in found if not isinstance(one, Tensor)]
    if wrong:
        raise ConfigError(
            f"ignored: {wrong[0]!r:.80} is not a parameter; pass parameters, such as model.head.parameters()"
        )
    return found

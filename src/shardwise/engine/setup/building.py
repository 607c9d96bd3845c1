"""Builds the units of a model that is being sharded: their groups, their shards, and equal numbers on every rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise.engine.engine import Engine
from shardwise.engine.extensions.all_gather import ExtendedGroup
from shardwise.engine.extensions.few_bits import BlockDtypes, BlockGroup
from shardwise.engine.extensions.offloaded import OffloadedGradient, gradients_in, offloaded
from shardwise.engine.mesh import Mesh
from shardwise.engine.setup.agreement import agree_on_init, agree_on_layout, agree_on_values
from shardwise.engine.setup.cores import share_cores
from shardwise.engine.units.group import Dtypes, Group, Original
from shardwise.engine.units.unit import Unit, UnitSettings
from shardwise.errors import LayoutError
from shardwise.modules.deferred_init.materialize import draws_on_device, materialize, on_meta
from shardwise.modules.deferred_init.put_off import blank_, have_no_numbers, is_put_off
from shardwise.modules.extended import EXTENDED
from shardwise.modules.linear_weights import linear_weights
from shardwise.modules.site import Values
from shardwise.modules.wrapping import UnitPlan
from shardwise.offload.stores import Stores, attach
from shardwise.offload.together import together
from shardwise.policy.precision import Precision
from shardwise.sharded.parameter import SHARDED_FACE

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def build_units(
    model: nn.Module,
    plans: list[UnitPlan],
    engine: Engine,
    stores: Stores,
) -> list[Unit]:
    """Build and shard a unit for each plan, the model's own first, with the engine's settings, after all ranks have
    agreed on the model and those settings. Every rank must call this. `stores`: for what rests on a medium.

    Raises:
        DifferentModelsError: on every rank, if ranks built different models or were given different settings.
    """
    mesh, precision, resharding = engine.mesh, engine.precision, engine.resharding
    few = linear_weights(model) if precision.frozen is not None else set()
    inner = UnitSettings(resharding)
    outer = UnitSettings(resharding, precision.param if precision.cast_inputs else None, precision.output)
    given = {fqn: parameter for plan in plans for fqn, parameter, _ in plan.parameters}
    if extended := [f"{fqn}|{tuple(p.shape)}" for fqn, p in given.items() if hasattr(p, EXTENDED)]:
        agree_on_layout([], [], extended, mesh)  # before their classes communicate
        if any(p.is_meta for p in given.values() if hasattr(p, EXTENDED)) and (draws_on_device() or not is_put_off()):
            raise LayoutError(
                f"{extended[0].split('|')[0]!r} defines its own all_gather and is on the meta device, where its "
                "initialisation cannot be recorded: build the model on a real device, or shard it with "
                "shardwise.compat.fsdp2.fully_shard and initialise it after to_empty"
            )
    groups = [_groups(plan, engine, few, stores) for plan in plans]
    units = [
        (Unit(plan.fqn, plan.modules, groups[index], (), inner if index else outer), plan)
        for index, plan in enumerate(plans)
    ]
    settings = (engine.strategy, precision, engine.slots, resharding, engine.align)
    agree_on_layout([unit for unit, _ in units], list(model.named_buffers()), settings, mesh)
    _attach(stores, [unit for unit, _ in units], engine)
    _take_room(stores, [group for of_unit in groups for group in of_unit], mesh)
    with torch.no_grad(), torch.inference_mode(False):
        if on_meta(model) and is_put_off() and not draws_on_device():
            _put_off(units, mesh)
        elif on_meta(model):
            _materialize(model, units, plans, mesh, precision)
        else:
            for unit, plan in units:
                agree_on_values([(fqn, parameter) for fqn, parameter, _ in plan.parameters], mesh)
                unit.shard_parameters(mesh.device)
    if stores.shards is not None:
        stores.shards.finish()
    for group in (group for unit, _ in units for group in unit.groups):
        for sharded in group.sharded:  # holders of the original, such as optimizers, find the sharded one here
            setattr(given[sharded.fqn], SHARDED_FACE, sharded)
    return [unit for unit, _ in units]


def _attach(stores: Stores, units: Sequence[Unit], engine: Engine) -> None:
    for unit in units:
        attach(unit, stores)
    if stores.host_step is not None:
        share_cores(engine.mesh)


def _take_room(stores: Stores, groups: Sequence[Group], mesh: Mesh) -> None:
    """Take room on the medium for slices that rest there, on all ranks or none. Gradients of parameters that become
    trainable later take theirs then."""
    if not stores.of_slices:
        return
    for group in groups:
        if group.trainable and isinstance(group.gradients, OffloadedGradient):
            group.gradients.reserve()
    with together((mesh.shard, mesh.replicate), "sw.shard"):
        for store in stores.of_slices:
            store.take_room()


def _materialize(
    model: nn.Module, units: Sequence[tuple[Unit, UnitPlan]], plans: list[UnitPlan], mesh: Mesh, precision: Precision
) -> None:
    by_plan = {id(plan): unit for unit, plan in units}

    def shard(plan: UnitPlan, values: Values) -> None:
        by_plan[id(plan)].shard_parameters(mesh.device, values)

    agree_on_init(draws_on_device(), mesh)
    real = [(fqn, parameter) for plan in plans for fqn, parameter, _ in plan.parameters if not parameter.is_meta]
    agree_on_values(real, mesh)
    with _SameRandomState(mesh):
        is_first = mesh.replicate.rank == mesh.shard.rank == 0
        materialize(model, plans, mesh.device, shard, tells=is_first)
    for unit, plan in units:
        if not plan.parameters:
            unit.shard_parameters(mesh.device)


def _put_off(units: Sequence[tuple[Unit, UnitPlan]], mesh: Mesh) -> None:
    """Shard the units. Parameters on the meta device get shards without numbers."""
    for unit, plan in units:
        real = {fqn: parameter for fqn, parameter, _ in plan.parameters if not parameter.is_meta}
        agree_on_values(list(real.items()), mesh)
        unit.shard_parameters(mesh.device, real.get)
        for group in unit.groups:
            blank = [face for face in group.sharded if face.fqn not in real]
            for face in blank:
                blank_(face.local)
            have_no_numbers(blank, group.counter)


class _SameRandomState:
    """Inside, every rank has rank 0's random state; afterwards ranks whose state was another get it back."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def __enter__(self) -> None:
        self._shared = self._mesh.is_dry
        if self._shared:  # no other ranks; and a random state is a real tensor even in a fake tensor mode
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


def _groups(plan: UnitPlan, engine: Engine, few: Collection[int], stores: Stores) -> list[Group]:
    """Group parameters by (stored dtype, trainable, in few bits, computed in the master dtype). Each group is in the
    order of the module tree.

    `few`: ids of parameters that are kept in few bits if they are frozen. `stores`: for what rests on a medium.
    """
    precision, group = engine.precision, engine.mesh.shard
    kinds: dict[tuple[torch.dtype, bool, bool, bool], list[Original]] = {}
    extended: list[Group] = []
    for item in plan.parameters:
        parameter = item[1]
        if hasattr(parameter, EXTENDED):
            extended.append(_extended(item, engine, stores))
            continue
        in_few = id(parameter) in few and not parameter.requires_grad and parameter.is_floating_point()
        kept = not in_few and precision.keeps(item[0])
        kinds.setdefault((parameter.dtype, parameter.requires_grad, in_few, kept), []).append(item)
    return [
        *(
            offloaded(BlockGroup if in_few else Group, stores)(
                items, _dtypes(dtype, trainable, precision, in_few, kept), group, engine.align, gradients_in(stores)
            )
            for (dtype, trainable, in_few, kept), items in kinds.items()
        ),
        *extended,
    ]


def _extended(item: Original, engine: Engine, stores: Stores) -> Group:
    """Make the group of a parameter whose class says how it travels."""
    fqn, parameter, _ = item
    if engine.mesh.secondary is not None:
        raise LayoutError(
            f"{fqn!r} defines its own all_gather, which is not possible with "
            f"reshard_after_forward={engine.resharding}: pass True or False"
        )
    precision = engine.precision
    kept = precision.keeps(fqn)
    dtypes = _dtypes(parameter.dtype, parameter.requires_grad, precision, in_few=False, kept=kept)
    make = offloaded(ExtendedGroup, stores)
    extended: Group = make(item, dtypes, engine.mesh.shard, _policy(precision), gradients_in(stores))
    return extended


def _policy(precision: Precision) -> MixedPrecisionPolicy:
    """Return the precision as FSDP2's policy."""
    from torch.distributed.fsdp import MixedPrecisionPolicy  # half a second, which plain parameters need not spend

    def named(name: str | None) -> torch.dtype | None:
        return None if name is None else getattr(torch, name)

    return MixedPrecisionPolicy(
        named(precision.param), named(precision.reduce), named(precision.output), precision.cast_inputs
    )


def _dtypes(stored: torch.dtype, trainable: bool, precision: Precision, in_few: bool, kept: bool) -> Dtypes:
    if not stored.is_floating_point:
        return Dtypes(stored, stored, stored)

    def given(name: str | None, default: torch.dtype) -> torch.dtype:
        return default if name is None else getattr(torch, name)

    master = given(precision.master, stored) if trainable else stored
    compute = master if kept else given(precision.param, master)
    reduce = given(precision.reduce, compute)
    if in_few and precision.frozen is not None:
        return BlockDtypes(master, compute, reduce, precision.frozen)
    return Dtypes(master, compute, reduce)


@torch.no_grad()
@torch.inference_mode(False)
def prepare_buffers(model: nn.Module, mesh: Mesh, precision: Precision, settled: Collection[nn.Module]) -> None:
    """Move buffers to the device, cast them if asked, and broadcast rank 0's where ranks differ. Every rank must call
    this.

    `settled`: modules that were sharded before and all modules below them; their buffers have the right dtype already.
    """
    dtype = None if precision.buffers is None else getattr(torch, precision.buffers)
    moved: dict[torch.Tensor, torch.Tensor] = {}  # a buffer in two places stays one
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer not in moved:
                is_cast = dtype is not None and buffer.is_floating_point() and module not in settled
                cast = dtype if is_cast else buffer.dtype
                moved[buffer] = buffer.to("meta" if buffer.is_meta else mesh.device, cast)
            if buffer is not None:
                module._buffers[name] = moved[buffer]
    real = [(name, buffer) for name, buffer in model.named_buffers() if buffer.numel() and not buffer.is_meta]
    agree_on_values(real, mesh)

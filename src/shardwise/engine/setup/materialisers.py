"""Where the values of a model on the meta device come from: its recorded initialisation, or the caller, later."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardwise import device_tools
from shardwise.engine.setup.agreement import agree_on_values, is_same
from shardwise.errors import DifferentModelsError
from shardwise.fsdp.engine import Engine
from shardwise.fsdp.mesh import Mesh
from shardwise.fsdp.parameter_group import Values
from shardwise.fsdp.shard import Planned, UnitPlan
from shardwise.modules.deferred_init.deferral import fill_nan_, have_no_numbers, is_deferred
from shardwise.modules.deferred_init.materialize import draws_on_device, materialize


def initialise(model: nn.Module, units: Sequence[Planned], engine: Engine) -> None:
    """Initialise the parameters that are on the meta device, and shard the units; a `Materialiser`. Inside
    `defer_init`, shards have no values yet. Every rank must call this.

    Raises DifferentModelsError on every rank if ranks would draw values in different ways.
    """
    if is_deferred() and not draws_on_device():
        _defer(units, engine.mesh)
    else:
        _materialize(model, units, engine.mesh)


def _materialize(model: nn.Module, units: Sequence[Planned], mesh: Mesh) -> None:
    by_plan = {id(plan): unit for unit, plan in units}

    def shard(plan: UnitPlan, values: Values) -> None:
        by_plan[id(plan)].shard_parameters(mesh.device, values)

    _agree_on_drawing(mesh)
    plans = [plan for _, plan in units]
    real = [(fqn, parameter) for plan in plans for fqn, parameter, _ in plan.parameters if not parameter.is_meta]
    agree_on_values(real, mesh)
    with SameRandomState(mesh):
        is_first = mesh.replicate.rank == mesh.shard.rank == 0
        materialize(model, plans, mesh.device, shard, tells=is_first)
    for unit, plan in units:
        if not plan.parameters:
            unit.shard_parameters(mesh.device)


def _agree_on_drawing(mesh: Mesh) -> None:
    """Raise DifferentModelsError on every rank if ranks would draw initial values in different ways, or on kinds of
    devices that draw different values from the same seed. Every rank must call this."""
    if mesh.is_dry:
        return
    name = "CPU" if mesh.device.type == "cpu" else device_tools.name(mesh.device)
    drawn = f"on its device ({name})" if draws_on_device() else "as the unsharded build does"
    if not is_same(drawn, mesh):
        raise DifferentModelsError(
            f"this rank would draw initial values {drawn} and some rank would draw them in another way, so the values "
            "would not belong to one model: call sw.shard inside sw.init_on_device() on every rank or on none; on "
            "none if ranks have different kinds of devices"
        )


def _defer(units: Sequence[Planned], mesh: Mesh) -> None:
    """Shard the units. Parameters on the meta device get shards without values."""
    for unit, plan in units:
        real = {fqn: parameter for fqn, parameter, _ in plan.parameters if not parameter.is_meta}
        agree_on_values(list(real.items()), mesh)
        unit.shard_parameters(mesh.device, real.get)
        for group in unit.groups:
            blank = [sharded for sharded in group.sharded if sharded.fqn not in real]
            for sharded in blank:
                fill_nan_(sharded.local)
            have_no_numbers(blank, group.counter)


class SameRandomState:
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

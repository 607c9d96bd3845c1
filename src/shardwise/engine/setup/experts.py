"""Expert parallelism: each rank of an axis `ep` of the data ranks holds whole experts of its own.

transformers' plan (`ep_plan`) cuts the experts and exchanges tokens in the forward of their module. That module becomes
a unit on ranks of its own: the data ranks that hold the same experts. The gradient of an expert comes from the tokens
of all data ranks, so it is divided by their number, as every gradient is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.engine.extensions.tensor_parallel import TensorParallelGroup, TensorPlacement
from shardwise.engine.setup.admission import check_not_transformers
from shardwise.engine.setup.tensor_adapters import set_aside
from shardwise.engine.setup.tensor_parallel import TensorParallelGroups, marking
from shardwise.errors import ConfigError, LayoutError
from shardwise.fsdp.engine import Engine
from shardwise.fsdp.mesh import Mesh, build_mesh
from shardwise.fsdp.parameter_group import Dtypes, Group, Original
from shardwise.fsdp.shard import Named, Seams, UnitPlan, dtypes_of, modules_below
from shardwise.fsdp.sharded_parameter import Placement
from shardwise.fsdp.strategy import Precision, Strategy
from shardwise.modules.adapters import base_of
from shardwise.modules.extended import is_tensor_parallel

_DISPATCH = "ep_dispatch_experts"
"""transformers' style of a module of experts that exchanges tokens."""


def apply_plan(model: nn.Module, experts: DeviceMesh, tensor: DeviceMesh, exchange: str = "auto") -> None:
    """Install the exchange of tokens of a transformers model, and mark the experts' parameters, which keep their whole
    shape and device until they are sharded. Every rank of the mesh must call this.

    Args:
        experts: one axis, whose ranks hold different experts.
        tensor: one axis of one rank.
        exchange: transformers' name of the implementation that sends tokens to experts.

    Raises ConfigError for a model without a plan or one that this number of ranks cannot have, LayoutError for a model
    that transformers has sharded.
    """
    check_not_transformers(model)
    asked, base, styles = f"sw.mesh(ep={experts.size()})", base_of(model), _styles_of(model)
    if _DISPATCH not in styles.values():
        raise ConfigError(
            f"{asked}: {type(base).__name__} has no plan that sends tokens to experts (`ep_plan`, {_DISPATCH!r}): "
            "leave ep out, which shards experts over all data ranks"
        )
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    with marking(model, f"{asked} of {type(base).__name__}"), set_aside(base, asked) as wrappers:
        styles = _styles_of(base)  # by the names from before PEFT
        adapted = next((name for name in wrappers if name in styles), None)
        if adapted is not None:
            raise ConfigError(f"{asked} beside an adapter of the experts {adapted!r} is not supported: leave ep out")
        known = {name for name, _ in (*base.named_modules(), *base.named_parameters())}
        if tied := next((name for name in styles if name not in known), None):
            raise ConfigError(f"{asked}: {tied!r} is tied to other experts, which is not supported: leave ep out")
        try:
            apply_expert_parallelism(base, experts, tensor, styles, exchange)
        except ValueError as error:
            raise ConfigError(f"{asked}: {error}") from None


def divided_modules(model: nn.Module) -> list[Any]:
    """Return the modules of experts that the plan of a transformers model divides; none if it has no such plan."""
    return [base_of(model).get_submodule(name) for name, style in _styles_of(model).items() if style == _DISPATCH]


def _styles_of(model: nn.Module) -> dict[str, str]:
    """Return the styles of a transformers model's plan for experts, by names of modules and parameters."""
    base: Any = base_of(model)
    plan = getattr(base, "ep_plan", None)
    return base._expand_parallel_plan(plan) if isinstance(plan, dict) else {}


@dataclass(frozen=True, eq=False)
class SameExperts(Mesh):
    """The data ranks that hold the same experts as this one."""

    axes: DeviceMesh = field(kw_only=True)
    """Their axes and, as the last one, that of the ranks that hold different experts."""


def same_experts(strategy: Strategy, axes: DeviceMesh) -> SameExperts:
    """Make the groups of the ranks that hold the same experts. Every rank must call this. `axes`: as the result's."""
    data = build_mesh(strategy, axes[tuple(axes.mesh_dim_names or ())[:-1]], None, None)
    return SameExperts(data.shard, data.replicate, data.device, data.spans, axes=axes)


def divide(seams: Seams, mesh: Mesh, precision: Precision, resharding: bool | int) -> None:
    """Let the experts of a model whose plan was applied be units of their own on these ranks."""
    if not isinstance(resharding, bool):
        raise ConfigError(f"reshard_after_forward={resharding} beside sw.mesh(ep=...): pass True or False")
    kind = ExpertGroups(mesh, precision)
    seams.planners.append(experts_alone)
    seams.reviews.insert(0, kind.stand_in)
    seams.kinds.insert(0, kind)


def experts_alone(model: nn.Module, chosen: Sequence[Named]) -> Sequence[Named]:
    """Add the modules that hold parameters of experts; a `Planner`."""
    wanted = {id(module) for _, module in chosen}
    return modules_below(
        model,
        lambda fqn, module: id(module) in wanted or any(map(is_tensor_parallel, module.parameters(recurse=False))),
    )


@dataclass(frozen=True, eq=False)
class ExpertPlacement(TensorPlacement):
    """The place of a stack of experts, of which the shard group holds some."""

    ranks: DeviceMesh = field(kw_only=True)

    @property
    def device_mesh(self) -> DeviceMesh:
        """`SameExperts.axes`."""
        return self.ranks


class ExpertGroup(TensorParallelGroup):
    """A group of parameters of experts."""

    mesh: Mesh

    def __init__(self, originals: Sequence[Original], dtypes: Dtypes, mesh: Mesh, align: int) -> None:
        self.mesh = mesh
        super().__init__(originals, dtypes, mesh.shard, align=align)

    def placement_of(self, index: int) -> Placement:
        """As the base class, with all axes that the experts are on."""
        if not isinstance(self.mesh, SameExperts):  # in a dry run
            return super().placement_of(index)
        spec, ranks = self.specs[index], self.mesh.axes
        return ExpertPlacement(self.layout, index, self.collectives, spec=spec, axes=self.axes, ranks=ranks)


class ExpertGroups(TensorParallelGroups):
    """Groups of parameters of experts, on the data ranks that hold the same ones."""

    def __init__(self, mesh: Mesh, precision: Precision) -> None:
        """`mesh`: the data ranks that hold the same experts as this one."""
        super().__init__(precision)
        self._mesh = mesh

    def stand_in(self, model: nn.Module, plans: Sequence[UnitPlan]) -> None:
        """As in the base class. Raises LayoutError for a unit that holds experts and other parameters."""
        for plan in plans:
            are_experts = [is_tensor_parallel(parameter) for _, parameter, _ in plan.parameters]
            if any(are_experts) and not all(are_experts):
                own, other = (plan.parameters[are_experts.index(kind)][0] for kind in (True, False))
                raise LayoutError(
                    f"{own!r} is of experts on ranks of their own, and {other!r} is in the same unit and is not: "
                    "they are gathered over different ranks. Leave ep out of the mesh"
                )
        super().stand_in(model, plans)

    def make(self, originals: Sequence[Original], engine: Engine) -> Group:
        """Make a group."""
        return ExpertGroup(originals, dtypes_of(originals[0], engine.precision), self._mesh, engine.align)

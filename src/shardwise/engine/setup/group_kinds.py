"""Kinds of groups besides plain ones: frozen weights in few bits, and parameters whose class says how they travel."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise.engine.extensions.all_gather import ExtendedGroup
from shardwise.engine.extensions.few_bits import BlockDtypes, BlockGroup
from shardwise.engine.extensions.offloaded import gradients_in, offloaded
from shardwise.engine.setup.agreement import agree_on_layout
from shardwise.engine.setup.offloading import OffloadedGroups
from shardwise.errors import ConfigError, LayoutError
from shardwise.fsdp.engine import Engine
from shardwise.fsdp.mesh import Mesh
from shardwise.fsdp.parameter_group import Group, Original
from shardwise.fsdp.shard import UnitPlan, dtypes_of
from shardwise.fsdp.strategy import Precision
from shardwise.modules.deferred_init.deferral import is_deferred
from shardwise.modules.deferred_init.materialize import draws_on_device
from shardwise.modules.extended import EXTENDED, plain_of
from shardwise.modules.linear_weights import linear_weights
from shardwise.offload.stores import ON_DEVICE, Stores

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def _stores(offloaded: OffloadedGroups | None, mesh: Mesh) -> Stores:
    return ON_DEVICE if offloaded is None else offloaded.stores(mesh)


class FewBitsGroups:
    """Groups of frozen weights of linear layers, kept as `precision.frozen` says."""

    def __init__(self, model: nn.Module, precision: Precision, offloaded: OffloadedGroups | None) -> None:
        self._linear = linear_weights(model)
        self._precision = replace(precision, keep=())  # `keep` is for others
        self._offloaded = offloaded

    def check(self, model: nn.Module, plans: Sequence[UnitPlan]) -> None:
        """Raise ConfigError if none of the parameters is such a weight; a `Review`."""
        if not any(self.key(fqn, parameter) for plan in plans for fqn, parameter, _ in plan.parameters):
            raise ConfigError(
                f"precision.frozen={self._precision.frozen!r}, but no linear layer of this {type(model).__name__} is "
                "frozen: call requires_grad_(False) on the base before sw.shard, or leave frozen out"
            )

    def key(self, fqn: str, parameter: nn.Parameter) -> Hashable:
        """Return True for such a weight, otherwise None."""
        is_frozen = not parameter.requires_grad and parameter.is_floating_point()
        return True if is_frozen and id(parameter) in self._linear else None

    def make(self, originals: Sequence[Original], engine: Engine) -> Group:
        """Make a group."""
        plain, bits = dtypes_of(originals[0], self._precision), self._precision.frozen
        assert bits is not None
        dtypes = BlockDtypes(plain.master, plain.compute, plain.reduce, bits)
        stores = _stores(self._offloaded, engine.mesh)
        make = offloaded(BlockGroup, stores)
        group: Group = make(originals, dtypes, engine.mesh.shard, engine.align, gradients_in(stores))
        return group


class ExtendedGroups:
    """Groups of one parameter each, whose class says how it travels."""

    def __init__(self, offloaded: OffloadedGroups | None) -> None:
        self._offloaded = offloaded
        self._found: list[tuple[str, nn.Parameter]] = []
        self._are_alike = False

    def stand_in(self, model: nn.Module, plans: Sequence[UnitPlan]) -> None:
        """Replace each such parameter by a plain one over the same memory, to build units with; a `Review`."""
        for plan in plans:
            plan.parameters = [(fqn, plain_of(parameter), sites) for fqn, parameter, sites in plan.parameters]
            self._found += [(fqn, p) for fqn, p, _ in plan.parameters if hasattr(p, EXTENDED)]

    def key(self, fqn: str, parameter: nn.Parameter) -> Hashable:
        """Return a key of its own for each such parameter, otherwise None."""
        return id(parameter) if hasattr(parameter, EXTENDED) else None

    def make(self, originals: Sequence[Original], engine: Engine) -> Group:
        """Make the group of one parameter.

        Raises LayoutError if the parameter has no values yet that could be recorded, or units reshard to smaller groups
        of ranks; and DifferentModelsError on every rank if ranks have other parameters of this kind.
        """
        self._agree(engine.mesh)
        [(fqn, _, _)] = originals
        if engine.mesh.secondary is not None:
            raise LayoutError(
                f"{fqn!r} defines its own all_gather, which is not possible with "
                f"reshard_after_forward={engine.resharding}: pass True or False"
            )
        dtypes, stores = dtypes_of(originals[0], engine.precision), _stores(self._offloaded, engine.mesh)
        make = offloaded(ExtendedGroup, stores)
        group: Group = make(originals[0], dtypes, engine.mesh.shard, _policy(engine.precision), gradients_in(stores))
        return group

    def _agree(self, mesh: Mesh) -> None:
        """Have ranks agree on these parameters, once, before the first one's class communicates."""
        if self._are_alike:
            return
        agree_on_layout([], [], [f"{fqn}|{tuple(p.shape)}" for fqn, p in self._found], mesh)
        self._are_alike = True
        if any(p.is_meta for _, p in self._found) and (draws_on_device() or not is_deferred()):
            raise LayoutError(
                f"{self._found[0][0]!r} defines its own all_gather and is on the meta device, where its "
                "initialisation cannot be recorded: build the model on a real device, or shard it with "
                "shardwise.compat.fsdp2.fully_shard and initialise it after to_empty"
            )


def _policy(precision: Precision) -> MixedPrecisionPolicy:
    """Return the precision as FSDP2's policy."""
    from torch.distributed.fsdp import MixedPrecisionPolicy  # half a second, which plain parameters need not spend

    def named(name: str | None) -> torch.dtype | None:
        return None if name is None else getattr(torch, name)

    return MixedPrecisionPolicy(
        named(precision.param), named(precision.reduce), named(precision.output), precision.cast_inputs
    )

"""Units that are offloaded between uses (`sw.Offload`): their groups, and space for them before they get values."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn
from torch.optim import Optimizer

from shardwise.comm.together import Doing
from shardwise.engine.extensions.offloaded import OffloadedGradient, gradients_in, offloaded, stores_for
from shardwise.engine.setup.cores import share_cores
from shardwise.fsdp.engine import Engine
from shardwise.fsdp.mesh import Mesh
from shardwise.fsdp.operations import attach_before
from shardwise.fsdp.parameter_group import Group, Original
from shardwise.fsdp.shard import Materialiser, PlainGroups, Planned, dtypes_of
from shardwise.fsdp.sharded_parameter import Owner
from shardwise.fsdp.strategy import Precision
from shardwise.offload.step_hook import put_last
from shardwise.offload.stores import Stores, any_offloaded, attach
from shardwise.policy.offload import Offload


class OffloadedGroups(PlainGroups):
    """Groups whose shards and gradients rest where `offload` says, in the stores of one call of `sw.shard`."""

    def __init__(self, offload: Offload, precision: Precision) -> None:
        super().__init__(precision)
        self._offload = offload
        self._stores: Stores | None = None

    def stores(self, mesh: Mesh) -> Stores:
        """Return the stores of the call, on this rank's device."""
        if self._stores is None:
            self._stores = stores_for(self._offload, mesh.device)
        return self._stores

    def make(self, originals: Sequence[Original], engine: Engine) -> Group:
        """Make a group."""
        stores, dtypes = self.stores(engine.mesh), dtypes_of(originals[0], engine.precision)
        made: Group = offloaded(Group, stores)(originals, dtypes, engine.mesh.shard, engine.align, gradients_in(stores))
        return made

    def wrap(self, materialise: Materialiser) -> Materialiser:
        """Return a materialiser that also allocates space for what is offloaded."""

        def run(model: nn.Module, units: Sequence[Planned], engine: Engine) -> None:
            attach_before(_step_with_stores)
            stores = self.stores(engine.mesh)
            for unit, _ in units:
                attach(unit, stores)
            if stores.host_step is not None:
                share_cores(engine.mesh)
            _allocate(stores, [group for unit, _ in units for group in unit.groups], engine.mesh)
            materialise(model, units, engine)
            if stores.shards is not None:
                stores.shards.finish()

        return run


def _step_with_stores(optimizer: Optimizer, owners: Collection[Owner]) -> None:
    """Called before each step of any optimizer."""
    put_last(optimizer, has_stores=any_offloaded(owners))


def _allocate(stores: Stores, groups: Sequence[Group], mesh: Mesh) -> None:
    """Allocate space on the tier for offloaded slices, on all ranks or none. Gradients of parameters that become
    trainable later take theirs then."""
    if not stores.of_slices:
        return
    for group in groups:
        if group.trainable and isinstance(group.gradients, OffloadedGradient):
            group.gradients.reserve()
    with Doing((mesh.shard, mesh.replicate), "sw.shard").together():
        for store in stores.of_slices:
            store.allocate()

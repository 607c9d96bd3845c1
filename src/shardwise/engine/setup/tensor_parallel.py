"""The kind of groups for parameters that are DTensors on a tensor-parallel mesh."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.engine.extensions.tensor_parallel import DTENSOR, TensorParallelGroup, check_placements, local_of
from shardwise.errors import LayoutError, MeshError
from shardwise.fsdp.engine import Engine
from shardwise.fsdp.modules import Original, UnitPlan
from shardwise.fsdp.parameter_group import Group
from shardwise.fsdp.shard import dtypes_of


class TensorParallelGroups:
    """Groups of parameters that are DTensors on a tensor mesh: one for each mesh."""

    def stand_in(self, model: nn.Module, plans: Sequence[UnitPlan]) -> None:
        """Replace each DTensor by a plain parameter over its local tensor, to build units with; a `Review`."""
        for plan in plans:
            for fqn, parameter, _ in plan.parameters:
                _check_dtensor(fqn, parameter)
            plan.parameters = [(fqn, local_of(parameter), sites) for fqn, parameter, sites in plan.parameters]

    def key(self, fqn: str, parameter: nn.Parameter) -> Hashable:
        """Return the tensor mesh of a DTensor, otherwise None."""
        dtensor = getattr(parameter, DTENSOR, None)
        return None if dtensor is None else dtensor.device_mesh

    def make(self, originals: Sequence[Original], engine: Engine) -> Group:
        """Make a group. Raises MeshError if the model's data ranks are not those of one place in the tensor mesh."""
        fqn, first, _ = originals[0]
        tensor_mesh = getattr(first, DTENSOR).device_mesh
        theirs = {int(rank) for rank in tensor_mesh.mesh.flatten()}
        ours = {rank for span in engine.mesh.spans for rank in span}
        if len(theirs) > 1 and len(theirs & ours) > 1:
            raise MeshError(
                f"{fqn!r} is a DTensor over ranks {sorted(theirs)}, of which this call would shard it over "
                f"{sorted(ours & theirs)} again: pass mesh= the data axes alone, such as mesh['dp_shard'] of the mesh "
                "that has the 'tp' axis"
            )
        dtypes = dtypes_of(originals[0], engine.precision)
        return TensorParallelGroup(originals, dtypes, engine.mesh.shard, align=engine.align)


def _check_dtensor(fqn: str, parameter: nn.Parameter) -> None:
    if not isinstance(parameter, DTensor):
        return
    reason = check_placements(fqn, parameter)
    if reason is None and parameter.is_meta:
        reason = f"{fqn!r} is a DTensor on the meta device: give it memory and values first"
    if reason is not None:
        raise LayoutError(reason)

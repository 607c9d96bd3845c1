"""What a training step would need on several meshes, from programs that are compiled but never run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import optax
from jax.sharding import Mesh

from shardwise.errors import PlanError
from shardwise.jax.devices import AXES
from shardwise.jax.gradients import LossFn
from shardwise.jax.placement import init
from shardwise.jax.report.collectives import CollectivesReport, collectives
from shardwise.jax.report.memory import ProgramMemory, memory
from shardwise.jax.report.products import product_flops
from shardwise.jax.report.tables import amount, columns
from shardwise.jax.rules import Rules
from shardwise.jax.step import train_step


@dataclass(frozen=True)
class Planned:
    """What a step needs on one mesh."""

    axes: dict[str, int]
    memory: ProgramMemory
    collectives: CollectivesReport
    flops: float
    """Floating-point operations of one device in the matrix products of one step, from `product_flops`."""

    @property
    def devices(self) -> int:
        return math.prod(self.axes.values())

    def to_dict(self) -> dict[str, Any]:
        """Return all of it, for JSON."""
        sent = self.collectives.to_dict()
        return {"axes": self.axes, "memory": self.memory.to_dict(), "collectives": sent, "flops": self.flops}


@dataclass(frozen=True)
class MeshComparison:
    """A comparison of meshes, one row each. `str()` is a table."""

    rows: tuple[Planned, ...]

    def fitting(self, budget_bytes: float) -> tuple[Planned, ...]:
        """Return the rows whose step needs at most this much memory of a device."""
        return tuple(row for row in self.rows if row.memory.peak_bytes <= budget_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it, for JSON."""
        return {"rows": [row.to_dict() for row in self.rows]}

    def __str__(self) -> str:
        cells = []
        for row in self.rows:
            axes = " x ".join(f"{name}={size}" for name, size in row.axes.items() if size > 1) or "-"
            needed = (row.memory.argument_bytes, row.memory.temporary_bytes, row.memory.peak_bytes)
            counts, nbytes = row.collectives.counts(), row.collectives.bytes()
            cells.append((row.devices, axes, *map(amount, needed), sum(counts.values()), amount(sum(nbytes.values()))))
        numbers = ("devices", "state", "temporaries", "together", "collectives", "of bytes")
        return columns((numbers[0], "axes", *numbers[1:]), cells, numbers)


def plan(
    init_fn: Callable[[Any], Any],
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    batch: Any,
    meshes: Mesh | Sequence[Mesh],
    *,
    rules: Rules | None = None,
    **settings: Any,
) -> MeshComparison:
    """Compile a step for each mesh, and read memory and collectives from the programs. Allocates nothing.

    Args:
        init_fn, rules: as for `init`.
        loss_fn, tx: as for `train_step`.
        batch: of the whole mesh; abstract, or arrays.
        meshes: one or several, of this process's devices, or of devices from `topology`, which need not exist. A CPU
            has as many devices as --xla_force_host_platform_device_count in XLA_FLAGS says, 512 if need be.
        settings: the other arguments of `train_step`.

    Raises:
        UserError: whatever `init` and `train_step` raise.
        PlanError: `meshes` is empty.
    """
    if isinstance(meshes, Mesh):
        meshes = [meshes]
    if not meshes:
        raise PlanError("plan(..., meshes=[]): give at least one mesh, such as shardwise.jax.mesh()")
    rows = []
    for mesh in meshes:
        step = train_step(loss_fn, tx, mesh, **settings)
        compiled = step.lower(step.init(init(init_fn, mesh, rules).abstract()), batch).compile()
        axes = {name: int(mesh.shape[name]) for name in AXES}
        rows.append(Planned(axes, memory(compiled), collectives(compiled), product_flops(compiled)))
    return MeshComparison(tuple(rows))

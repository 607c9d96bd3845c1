"""The tensor axis of a dry run: a model is cut by its own plan, over ranks of torch's fake process group."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import PlanError
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recorder import Recorder
from shardwise.plan.dry_run.recording import TENSOR
from shardwise.plan.dry_run.traced_collectives import TracedCollectives


@contextmanager
def tensor_axis(job: Job, rank: int, recorder: Recorder) -> Iterator[DeviceMesh | None]:
    """Inside, this process has a process group: the ranks that share each matrix product with `rank`. Yields their
    mesh, of which collectives move nothing; None for a job without such an axis.

    Raises PlanError if there is a process group already.
    """
    if job.tp == 1:
        yield None
        return
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from shardwise.engine.extensions.tensor_parallel import AXES

    if dist.is_initialized():
        raise PlanError(
            f"tp={job.tp}: a plan makes a process group of its own for this, but this process has one: plan before "
            "torch.distributed.init_process_group, or with shardwise plan"
        )
    dist.init_process_group("fake", rank=rank % job.tp, world_size=job.tp)
    try:
        mesh = init_device_mesh("cpu", (job.tp,), mesh_dim_names=("tp",))
        on_streams = not job.on_cpu
        AXES[mesh.get_group()] = TracedCollectives(TENSOR, rank % job.tp, job.tp, recorder, on_streams)
        yield mesh
    finally:
        dist.destroy_process_group()


def cut_evenly_by(model: nn.Module) -> int:
    """Return `Facts.cut_evenly_by`."""
    if not getattr(model, "tp_plan", None):
        return 1
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return 0
    from shardwise.engine.setup.tensor_parallel import heads_of

    return math.gcd(*heads_of(config).values())


def cut(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Make a model tensor-parallel over a mesh by its own plan, in place; None: leave it as it is.

    Raises PlanError if it has no plan; ConfigError and LayoutError as `apply_plan`.
    """
    if mesh is None:
        return
    from shardwise.engine.setup.tensor_parallel import apply_plan

    if not getattr(model, "tp_plan", None):
        raise PlanError(
            f"tp={mesh.size()}: {type(model).__name__} has no tensor-parallel plan, which a model of your own states "
            "as a dict of torch's ParallelStyles by names of modules in its attribute tp_plan: leave tp out"
        )
    apply_plan(model, mesh, "auto")

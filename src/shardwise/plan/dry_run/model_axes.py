"""Axes that a model's own code communicates over, in a dry run: over ranks of torch's fake process group, a model is
cut by its own plan, attends across slices of sequences, and sends tokens to experts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.engine.extensions.tensor_parallel import AXES
from shardwise.errors import ConfigError, PlanError
from shardwise.plan.dry_run.job import Job, check_alone
from shardwise.plan.dry_run.recorder import Recorder
from shardwise.plan.dry_run.recording import CONTEXT, EXPERTS, TENSOR
from shardwise.plan.dry_run.traced_collectives import TracedCollectives

Axes = Mapping[str, DeviceMesh]
"""By its name, the ranks of each axis over which the code of one rank's model communicates; axes of one rank are left
out."""
_NAMES = {"tp": TENSOR, "ep": EXPERTS, "cp": CONTEXT}


@contextmanager
def model_axes(job: Job, rank: int, recorder: Recorder) -> Iterator[Axes]:
    """Inside, this process has a process group: the ranks around `rank` within which the model's code communicates.
    Yields their axes "cp", "tp" and "ep", of which collectives move nothing. A job without them needs no process group.

    Raises PlanError if there is a process group already.
    """
    if job.ranks_of_code == 1:
        yield {}
        return
    check_alone(job)
    own = rank % job.ranks_of_code
    strides = {"tp": (job.tp, 1), "ep": (job.ep, 1), "cp": (job.cp, job.tp)}
    ranks = {axis: _beside(own, *strides[axis]) for axis in _NAMES}
    dist.init_process_group("fake", rank=own, world_size=job.ranks_of_code)
    try:
        # torch remembers meshes of DTensors, and that equal ones have groups of the same names: so they are no axes of
        # one mesh, which would be equal for ranks of different groups, and that of "tp" or "ep" is always the first.
        groups = {axis: dist.new_group([*members]) for axis, members in ranks.items() if len(members) > 1}
        recorder.groups = {group.group_name: (_NAMES[axis], group.size()) for axis, group in groups.items()}
        for axis in groups.keys() & {"tp", "ep"}:
            place, size = ranks[axis].index(own), len(ranks[axis])
            AXES[groups[axis]] = TracedCollectives(_NAMES[axis], place, size, recorder, not job.on_cpu)
        yield {axis: DeviceMesh.from_group(group, "cpu", mesh_dim_names=(axis,)) for axis, group in groups.items()}
    finally:
        dist.destroy_process_group()


def _beside(rank: int, size: int, stride: int) -> range:
    """Return the group of a rank on an axis of this size whose ranks are so far apart."""
    first = rank - rank // stride % size * stride
    return range(first, first + size * stride, stride)


def cut_evenly_by(model: nn.Module) -> int:
    """Return `Facts.cut_evenly_by`."""
    if not getattr(model, "tp_plan", None):
        return 1
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return 0
    from shardwise.engine.setup.tensor_parallel import heads_of

    return math.gcd(*heads_of(config).values())


def sliced_evenly_by(model: nn.Module) -> int:
    """Return `Facts.sliced_evenly_by`."""
    from shardwise.engine.setup.context_parallel import check_model, heads_on_a_rank

    inside = next((module for module in model.modules() if hasattr(module, "set_attn_implementation")), None)
    if inside is None:
        return 1
    try:
        check_model(inside, 1)
    except ConfigError:
        return 1
    return heads_on_a_rank(inside)


def experts_divided_by(model: nn.Module, job: Job) -> int:
    """Return `Facts.experts_divided_by`."""
    if not any(getattr(module, "ep_plan", None) for module in model.modules()):
        return 1
    from shardwise.engine.setup.experts import divided_modules

    return math.gcd(*(module.num_experts * job.ep for module in divided_modules(model))) or 1


def divide(model: nn.Module, axes: Axes, recorder: Recorder) -> None:
    """Cut a model over the axis "tp" by its own plan, let it attend across the axis "cp", and divide its experts over
    the axis "ep", in place.

    Raises PlanError for a model that has no such plan, or whose attention cannot be told of slices; ConfigError and
    LayoutError as `sw.shard`.
    """
    if "tp" in axes:
        from shardwise.engine.setup.tensor_parallel import apply_plan

        if not getattr(model, "tp_plan", None):
            raise PlanError(
                f"tp={axes['tp'].size()}: {type(model).__name__} has no tensor-parallel plan, which a model of your "
                "own states as a dict of torch's ParallelStyles by names of modules in its attribute tp_plan: leave tp "
                "out"
            )
        apply_plan(model, axes["tp"], "auto")
    if "cp" in axes:
        from shardwise.engine.setup.context_parallel import attend_across

        if not any(hasattr(module, "set_attn_implementation") for module in model.modules()):
            raise PlanError(
                f"cp={axes['cp'].size()}: {type(model).__name__} is not a transformers model, whose attention can be "
                "told of slices of sequences: leave cp out"
            )
        attend_across(model, axes["cp"])
    if "ep" in axes:
        from shardwise.engine.setup.experts import apply_plan as divide_experts
        from shardwise.plan.dry_run.balanced_exchange import registered

        alone = DeviceMesh.from_group(dist.new_group([dist.get_rank()]), "cpu", mesh_dim_names=("tp",))
        divide_experts(model, axes["ep"], alone, registered(recorder))

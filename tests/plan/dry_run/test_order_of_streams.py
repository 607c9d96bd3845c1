"""A GPU's dry run issues what an accelerator's engine issues, in its order and on its streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise import accelerators
from shardwise.engine.lookup import require_engine
from shardwise.fsdp import torch_collectives as on_streams
from shardwise.fsdp.torch_collectives import StreamCollectives
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import Collective, Exchange, Fence, Kernel, StepEvent, StepPhase
from shardwise.plan.dry_run.step import record
from tests.comm.nccl_double import doubled
from tests.engine.cases import FP32, MIXED, Case
from tests.engine.rig import seeded
from tests.plan.rig import Regression, job_of

if TYPE_CHECKING:
    from tests.ranks import RankPools

GPU = "h100-sxm-80gb"
CASES = [Case("full_shard", 2), Case("shard_grad_op", 2), Case("hybrid_shard", 4), Case("no_shard", 2)]
CALLS = {
    "all_gather": "",
    "reduce_scatter": "",
    "all_reduce": "",
    "exchange": "",
    "mark": "written",
    "settle": "settled",
}
"""Of collectives; and what the last two are called in a recording."""


class Watch(TorchDispatchMode):
    """Writes down what the engine gives to streams other than the one that computes, and copies of gradients."""

    def __init__(self, shard: StreamCollectives, replicate: StreamCollectives) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._groups = {id(shard): "shard", id(replicate): "replicate"}
        self._streams: dict[int, str] = {}
        if shard.world_size > 1:
            self._streams = {id(shard._slice_stream): "shard slices", id(shard._reduce_stream): "shard sums"}
        self._looks = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        stream = self._streams.get(id(accelerators.current_stream(torch.device("cpu"))), "")
        if self._looks and func._schema.is_mutable and (stream or name == "_foreach_copy_"):
            self.seen.append(f"{stream} {name}")
        return func(*args, **(kwargs or {}))

    def noting(self, call: str, own: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, written down."""

        def noted(collectives: Any, *args: Any, **kwargs: Any) -> Any:
            if collectives.world_size > 1:
                self.seen.append(f"{self._groups[id(collectives)]} {CALLS[call] or call}")
            return own(collectives, *args, **kwargs)

        return noted

    def unseen(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """What stands for a launch of NCCL's."""

        def launched(*args: Any, **kwargs: Any) -> Any:
            self._looks = False
            try:
                return own(*args, **kwargs)
            finally:
                self._looks = True

        return launched


@contextmanager
def watched(shard: StreamCollectives, replicate: StreamCollectives) -> Iterator[list[str]]:
    watch = Watch(shard, replicate)
    with ExitStack() as stack:
        for kind in {type(shard), type(replicate)}:
            for call in CALLS:
                stack.enter_context(mock.patch.object(kind, call, watch.noting(call, getattr(kind, call))))
        for name in ("all_gather_single", "reduce_scatter_single"):
            stack.enter_context(mock.patch.object(on_streams, name, watch.unseen(getattr(on_streams, name))))
        everywhere = watch.unseen(torch.distributed.all_reduce)
        stack.enter_context(mock.patch.object(on_streams.dist, "all_reduce", everywhere))
        stack.enter_context(watch)
        yield watch.seen


def issued(case: Case, precision: sw.Precision) -> list[str]:
    """By the engine in the second step, up to the optimizer."""
    with doubled():
        model = case.shard(seeded(lambda: Regression(3)), precision=precision)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        mesh = require_engine(model).mesh
        for _ in range(2):
            with watched(mesh.shard, mesh.replicate) as seen:  # type: ignore[arg-type]
                model(torch.ones(5, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen


def recorded(events: Sequence[StepEvent]) -> Iterator[str]:
    """The same of a recording."""
    for event in events:
        if isinstance(event, Kernel | Collective | Fence | Exchange) and event.phase is StepPhase.OPTIMIZER:
            return
        if isinstance(event, Kernel) and (event.stream or event.name == "_foreach_copy_"):
            yield f"{event.stream} {event.name}"
        elif isinstance(event, Collective):
            yield f"{event.group} {event.op}"
        elif isinstance(event, Fence):
            yield f"{event.group} {event.what}"
        elif isinstance(event, Exchange):
            yield f"{event.group} exchange"


@pytest.mark.parametrize("precision", [FP32, MIXED], ids=["fp32", "mixed"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_recorded_is_what_is_issued(ranks: RankPools, case: Case, precision: sw.Precision) -> None:
    found = ranks(case.world_size).run(issued, case, precision)[0]
    job = job_of(case, precision)
    events = record(lambda: Regression(3), Job(**{**_fields(job), "gpu": GPU})).events
    assert list(recorded(events)) == found
    assert any(line.endswith("_foreach_copy_") for line in found)
    assert any(line.endswith("exchange") for line in found)


def _fields(job: Job) -> dict[str, Any]:
    return {name: getattr(job, name) for name in job.__dataclass_fields__}


def test_a_cpus_dry_run_has_no_streams() -> None:
    events = record(lambda: Regression(3), job_of(Case("full_shard", 2), MIXED)).events
    assert not [event for event in events if isinstance(event, Fence | Exchange)]
    assert not [event for event in events if isinstance(event, Kernel) and event.name == "_foreach_copy_"]
    scaled = [event for event in events if isinstance(event, Kernel) and event.name == "mul_"]
    assert scaled, "a CPU scales each gradient as it comes"

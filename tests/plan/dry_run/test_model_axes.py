"""Tensor and context parallelism, run dry: memory, activations and traffic of the real engine on as many ranks, to the
byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.engine.extensions import tensor_parallel
from shardwise.engine.extensions.tensor_parallel import AXES
from shardwise.engine.lookup import require_engine
from shardwise.errors import ConfigError, PlanError
from shardwise.fsdp.torch_collectives import collectives_for
from shardwise.plan.dry_run.forward import TrainingForward
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import (
    EXPERTS,
    SAME_EXPERTS,
    TENSOR,
    ActivationCollective,
    Collective,
    HostRead,
    Recording,
    Wait,
)
from shardwise.plan.dry_run.step import record
from shardwise.plan.models.source import resolve
from shardwise.plan.search.evaluator import Evaluator
from shardwise.plan.simulate.forecast import forecast_of
from shardwise.plan.simulate.network import Cluster
from tests.comm.recording import RecordingCollectives
from tests.engine.cases import FP32, MIXED
from tests.engine.rig import recording
from tests.engine.tensor.rig import forget_meshes
from tests.plan.rig import (
    LLAMA,
    STATE,
    Regression,
    adamw,
    build,
    built,
    check,
    gpt2,
    muon,
    recorded_of,
    route_evenly,
    state_of,
    traffic_of,
)

if TYPE_CHECKING:
    from tests.ranks import RankPools

Sent = list[tuple[str, int]]
"""(operator, bytes of the whole buffer, or those that an all_to_all sends to other ranks), in order."""


class OverTheAxis(TorchDispatchMode):
    """Lists the collectives that model code launches. Knows nothing of the planner."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: Sent = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "_local_tensor") or kind.__name__ in _WRAPPERS for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if name == "_c10d_functional.all_reduce.default":
            self.sent.append(("all_reduce", args[0].nbytes))
        elif name == "_c10d_functional.all_gather_into_tensor.default":
            self.sent.append(("all_gather", out.nbytes))
        elif name == "c10d.allreduce_.default":
            self.sent.append(("all_reduce", args[0][0].nbytes))
        elif name == "_c10d_functional.all_to_all_single.default":
            sizes = [args[0][:count].nbytes for count in args[2]]  # by rank that they go to
            self.sent.append(("all_to_all", sum(sizes) - sizes[0]))
        elif name == "c10d.alltoall_base_.default":
            ranks = (
                args[2].size() if isinstance(args[2], dist.ProcessGroup) else dist.ProcessGroup.unbox(args[2]).size()
            )
            self.sent.append(("all_to_all", args[1].nbytes * (ranks - 1) // ranks))
        return out


_OF_EXPERTS = "replicas of experts"
_WRAPPERS = ("DTensor", "AsyncCollectiveTensor", "ShardedParameter")


@contextmanager
def recording_axes() -> Iterator[None]:
    """Make the collectives of axes that models are cut over record their calls, too."""
    original = tensor_parallel.collectives_for
    tensor_parallel.collectives_for = lambda group, device: RecordingCollectives(original(group, device))  # type: ignore[assignment, return-value]
    try:
        yield
    finally:
        tensor_parallel.collectives_for = original


def job_of(ranks: int, **options: Any) -> Job:
    return Job(**{"gpu": "cpu", "gpus_per_node": ranks, "seq_len": 128, "micro_batch": 4, **options})


def real(name: str, job: Job) -> tuple[dict[str, int], list[tuple[str, str, int]], Sent]:
    """State between steps, the engine's traffic in the third step, and that of the model's code."""
    forget_meshes()
    torch.manual_seed(0)
    model = built(name, job)
    feed = TrainingForward(model, job)
    mesh = sw.mesh(**job.mesh)
    groups: dict[str, Any] = {}
    if job.tp > 1:
        axis = mesh["tp"].get_group()
        groups[TENSOR] = AXES[axis] = RecordingCollectives(collectives_for(axis, "cpu"))
    if job.ep > 1:
        route_evenly(model)
    with recording(), recording_axes():
        sw.shard(model, job.strategy, mesh=mesh, tp_plan="auto" if job.tp > 1 else None, precision=job.precision)
    optimizer = (muon if job.optimizer == "muon" else adamw)(model.parameters())
    own = require_engine(model).mesh
    groups |= {"shard": own.shard, "replicate": own.replicate}
    unit = next((unit for unit in require_engine(model).units if unit.mesh is not own), None)
    if unit is not None:
        groups |= {SAME_EXPERTS: unit.mesh.shard, EXPERTS: unit.groups[0].axes[0], _OF_EXPERTS: unit.mesh.replicate}
    recorded = {key: group for key, group in groups.items() if isinstance(group, RecordingCollectives)}
    over_axis = OverTheAxis()
    for _ in range(3):
        start = {key: len(group.events) for key, group in recorded.items()}
        over_axis.sent.clear()
        with over_axis:
            feed.loss(model, feed.inputs()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    sent = [
        ("replicate" if key == _OF_EXPERTS else key, event.op, event.bytes_sent)
        for key, group in recorded.items()
        for event in group.events[start[key] :]
        if event.op in {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
    ]
    return {kind: sw.memory(model).peak[kind] for kind in STATE}, sent, over_axis.sent


def sent_over_axis(recorded: Recording) -> Sent:
    return [(event.op, event.nbytes) for event in recorded.events if isinstance(event, ActivationCollective)]


@pytest.mark.parametrize(
    ("name", "precision", "strategy"),
    [
        ("llama", FP32, "full_shard"),
        ("llama", MIXED, "shard_grad_op"),
        pytest.param("mixtral", MIXED, "full_shard", marks=pytest.mark.slow),
    ],
)
def test_memory_and_traffic_at_two_by_two(ranks: RankPools, name: str, precision: sw.Precision, strategy: str) -> None:
    check_against_a_run(ranks, name, job_of(4, tp=2, precision=precision, strategy=strategy))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"cp": 4}),  # more ranks than heads of keys
        ("llama", {"cp": 2, "strategy": "hybrid_shard", "shard_group": 1}),
        ("llama", {"cp": 2, "tp": 2, "seq_len": 127}),  # padded
        ("gpt2", {"cp": 2, "precision": MIXED}),
        pytest.param("mixtral", {"cp": 2, "precision": MIXED, "strategy": "shard_grad_op"}, marks=pytest.mark.slow),
    ],
)
def test_memory_and_traffic_with_slices_of_sequences(ranks: RankPools, name: str, options: dict[str, Any]) -> None:
    check_against_a_run(ranks, name, job_of(4, **options))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"optimizer": "muon"}),
        pytest.param(
            "llama", {"optimizer": "muon", "strategy": "hybrid_shard", "shard_group": 1}, marks=pytest.mark.slow
        ),
        ("llama", {"lora": {"r": 4}, "precision": MIXED}),
    ],
)
def test_whole_matrices_and_adapters(ranks: RankPools, name: str, options: dict[str, Any]) -> None:
    if "lora" in options:
        pytest.importorskip("peft")
    check_against_a_run(ranks, name, job_of(4, tp=2, **options))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full"])
def test_activations_of_adapters(ranks: RankPools, mode: str) -> None:
    pytest.importorskip("peft")
    check(ranks, "llama", mode, tp=2, lora={"r": 4})


@pytest.mark.parametrize(
    "options",
    [
        {"ep": 2},
        {"ep": 4, "strategy": "shard_grad_op"},  # no rank has the experts of another
        pytest.param(
            {"ep": 2, "cp": 2, "strategy": "hybrid_shard", "shard_group": 1, "precision": FP32}, marks=pytest.mark.slow
        ),
        pytest.param({"ep": 2, "strategy": "shard_optimizer"}, marks=pytest.mark.slow),
    ],
)
def test_memory_and_traffic_with_experts_of_ranks_own(ranks: RankPools, options: dict[str, Any]) -> None:
    check_against_a_run(ranks, "mixtral", job_of(4, **{"precision": MIXED, **options}))


def check_against_a_run(ranks: RankPools, name: str, job: Job) -> None:
    for rank, (state, sent, over_axis) in enumerate(ranks(4).run(real, name, job)):
        recorded = recorded_of(name, job, rank)
        assert state_of(recorded) == state
        for group in ("shard", "replicate", TENSOR, SAME_EXPERTS, EXPERTS):
            dry, counted = (
                [(op, nbytes) for of, op, nbytes in events if of == group and (nbytes > 4096 or op == "all_to_all")]
                for events in (traffic_of(recorded), sent)
            )
            if group == "replicate" and job.ep > 1:  # experts have a group of their own, over the same ranks
                dry, counted = sorted(dry), sorted(counted)
            assert dry == counted
        assert sent_over_axis(recorded) == over_axis
        assert len(over_axis) > 6


@pytest.mark.parametrize("mode", ["none", "full"])
def test_activations_of_a_model_that_is_cut(ranks: RankPools, mode: str) -> None:
    check(ranks, "llama", mode, tp=2)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_activations_of_experts(ranks: RankPools, mode: str) -> None:
    check(ranks, "mixtral", mode, ep=2)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_activations_of_slices(ranks: RankPools, mode: str) -> None:
    check(ranks, "llama", mode, cp=2)


def test_every_collective_over_the_axis_is_waited_for() -> None:
    job = Job(seq_len=16, gpus_per_node=4, tp=2, cp=2, precision=MIXED)
    events = record(lambda: build("llama"), job).events
    issued = [event.number for event in events if isinstance(event, Collective | ActivationCollective)]
    assert sorted(event.number for event in events if isinstance(event, Wait)) == sorted(issued)


def test_the_exchange_of_tokens_goes_over_ranks_beside_one_another_and_makes_the_host_wait() -> None:
    job = Job(seq_len=16, gpus_per_node=8, nodes=2, cp=2, ep=4, precision=MIXED)
    recorded = recorded_of("mixtral", job)
    sent = [event for event in recorded.events if isinstance(event, ActivationCollective) and event.group == EXPERTS]
    whole = 8 * 2 * 64 * 2  # tokens of the slice, two experts for each, hidden states in bf16
    assert Counter((event.ranks, event.nbytes) for event in sent) == {
        (4, whole * 3 // 4): 3 * 4,
        (4, 4 * 8 * 3 // 4): 3,
    }
    assert sum(isinstance(event, HostRead) for event in recorded.events) == 3
    cluster = Cluster(job.hardware, job.node_interconnect, job.gpus_per_node, job.nodes, ep=job.ep)
    assert cluster.links(EXPERTS, job.ep) == "within a node"
    assert cluster.links(SAME_EXPERTS, job.shard_ranks // job.ep) == "between nodes"
    forecast = forecast_of(recorded)
    assert forecast.exposed_comm_s > 0
    assert {"experts", "same experts gathers", "same experts sums"} <= set(forecast.timeline.streams)


def test_a_plan_leaves_no_process_group_and_plans_again_at_another_size() -> None:
    sizes = []
    build_wider = resolve({**LLAMA, "num_key_value_heads": 4}).builder()
    for tp, cp in ((2, 2), (1, 1), (4, 1), (1, 4), (2, 1), (2, 2)):
        recorded = record(build_wider, Job(seq_len=16, gpus_per_node=8, tp=tp, cp=cp, precision=MIXED, gpu="cpu"))
        sizes.append(state_of(recorded)["gathered_slots"])
        collectives = [event for event in recorded.events if isinstance(event, ActivationCollective)]
        expected = {("tensor", False): tp, ("context", True): cp}
        found = {(event.group, event.op == "all_to_all") for event in collectives}
        assert found == {kind for kind, ranks in expected.items() if ranks > 1}
        assert not dist.is_initialized()
    assert sizes[2] < sizes[0] == sizes[4] == sizes[5] < sizes[1] == sizes[3]


def test_a_process_with_a_process_group_is_told_whether_the_answer_is_stored_or_not() -> None:
    evaluate = Evaluator(resolve(LLAMA))
    stored, another = (job_of(2, seq_len=16, cp=2, micro_batch=size) for size in (1, 2))
    evaluate(stored)
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        for job in (stored, another):
            with pytest.raises(PlanError, match="cp=2: a plan makes a process group of its own for this, but this"):
                evaluate(job)
        assert evaluate(replace(stored, cp=1)).fits
    finally:
        dist.destroy_process_group()


class Cut(Regression):
    tp_plan = MappingProxyType({"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})

    def __init__(self) -> None:
        super().__init__(3)
        for block in self.blocks:
            block.up, block.down = nn.Linear(6, 12), nn.Linear(12, 6)


class Talks(Cut):
    """Its ranks talk about something else."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        dist.all_reduce(torch.ones(2))
        return super().forward(*args, **kwargs)


def test_collectives_of_the_model_over_other_groups_are_refused() -> None:
    with pytest.raises(PlanError, match="calls all_reduce over a process group that is no tensor-, context- or"):
        record(Talks, job_of(4, tp=2))


def test_a_model_of_ones_own_states_its_plan() -> None:
    recorded = record(Cut, job_of(2, tp=2))
    assert sent_over_axis(recorded) == [("all_reduce", 4 * 6 * 4)] * 6  # each block's output and input gradient


def test_what_cannot_be_cut_is_told() -> None:
    with pytest.raises(ConfigError, match=r"tp=3 does not divide 4 ranks \(1 nodes of 4\); use one of 1, 2, 4"):
        job_of(4, tp=3)
    with pytest.raises(ConfigError, match=r"cp=4 x tp=2 does not divide 4 ranks \(1 nodes of 4\)"):
        job_of(4, tp=2, cp=4)
    with pytest.raises(ConfigError, match="cp=256 is more than the 128 tokens of a sequence"):
        job_of(256, cp=256)
    with pytest.raises(ConfigError, match="cp=8 does not divide the model's 4 heads of attention on a rank"):
        record(lambda: build("llama"), job_of(8, cp=8))
    with pytest.raises(ConfigError, match="cp=2: T5ForConditionalGeneration has more than one sequence in a batch"):
        record(lambda: build("t5"), job_of(2, cp=2))
    with pytest.raises(PlanError, match="cp=2: Regression is not a transformers model"):
        record(lambda: Regression(3), job_of(2, cp=2))
    with pytest.raises(ConfigError, match="tp=8 does not divide the model's num_attention_heads=4"):
        record(lambda: build("llama"), job_of(8, tp=8))
    with pytest.raises(PlanError, match="tp=2: GPT2LMHeadModel has no tensor-parallel plan"):
        record(gpt2, job_of(2, tp=2))
    with pytest.raises(ConfigError, match=r"ep=2\): GPT2LMHeadModel has no plan that sends tokens to experts"):
        record(gpt2, job_of(2, ep=2))
    with pytest.raises(ConfigError, match=r"ep=3\): Cannot evenly shard 4 experts across 3"):
        record(lambda: build("mixtral"), job_of(3, ep=3))
    with pytest.raises(ConfigError, match="reshard_after_forward=2 beside"):
        record(lambda: build("mixtral"), job_of(4, ep=2, reshard_after_forward=2))
    with pytest.raises(ConfigError, match="tp=2 with optimizer='adamw-8bit' is not supported"):
        job_of(2, tp=2, optimizer="adamw-8bit")
    with pytest.raises(ConfigError, match=r"tp=2 with precision\.frozen='nf4' is not supported"):
        job_of(2, tp=2, lora=4, precision=replace(MIXED, frozen="nf4"))
    assert not dist.is_initialized()

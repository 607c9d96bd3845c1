"""Forecasts by formula: what search, tables and reports are tested on without a dry run."""

from dataclasses import dataclass
from math import inf
from types import SimpleNamespace
from typing import Any

from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import StepPhase
from shardwise.plan.report.assumptions import Assumption
from shardwise.plan.report.report import PlanReport
from shardwise.plan.search.exploration import Objective, ranked
from shardwise.plan.search.space import search_space
from shardwise.plan.search.sweeps import explore_sweep
from shardwise.plan.simulate.forecast import NCCL_BYTES, Cost, cost_of, nccl_bytes_of
from shardwise.plan.simulate.timeline import Span, Stall, Timeline

GIB = 2**30


@dataclass(frozen=True)
class Formula:
    """A stand-in for `Forecast`: the same names, figures from a formula of the job. With offload, copies take longer
    than computation where batches are small."""

    job: Job
    memory: dict[str, int]
    usable_bytes: int = 80 * GIB
    context_bytes: int = 2 * GIB - NCCL_BYTES
    slack: float = 1.0
    """Reserved over allocated."""
    step_s: float = 0.0
    """Of computation that a step takes whatever its batch, with as much for every micro-batch."""
    late_s: float = 0.0
    """Of a step that waits for launches."""

    @property
    def nccl_bytes(self) -> int:
        return nccl_bytes_of(self.job)

    @property
    def peak_memory_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def reserved_memory_bytes(self) -> int:
        return int(self.peak_memory_bytes * self.slack)

    host_bytes_per_node: int = 0
    disk_bytes_per_node: int = 0
    host_has_bytes: float = inf

    @property
    def exposed_offload_s(self) -> float:
        return max(0.0, self.copies_s - self.compute_s) + self.step_copies_s

    @property
    def copies_s(self) -> float:
        """Of the busier way: weights come, gradients go, and all but a step's first come to be added to."""
        places, up, down = self.job.offload, 0, 0
        if places is not None and places.params is not None:
            up += (2 if self.job.strategy.reshards_after_forward else 1) * self.job.accumulation * 32
        if places is not None and places.gradients is not None:
            up += (self.job.accumulation - 1) * 32
            down += self.job.accumulation * 32
        return max(up, down) / self.job.shard_ranks / 25

    @property
    def step_copies_s(self) -> float:
        places = self.job.offload
        return 0.0 if places is None else 96 / self.job.shard_ranks / 25

    @property
    def recording(self) -> Any:
        """What bounds need of one: parameters in the compute dtype."""
        return SimpleNamespace(
            facts=SimpleNamespace(unit_bytes={"": 16 * GIB}, layers=32, unused=0, smaller_units=(), package_kernels="")
        )

    @property
    def cost(self) -> Cost | None:
        job = self.job
        if job.price_per_hour is None:
            return None
        return cost_of(job.price_per_hour, job.world_size, self.step_time_s, job.tokens_per_rank * job.world_size)

    @property
    def fits(self) -> bool:
        return self.reserved_memory_bytes + self.context_bytes + self.nccl_bytes <= self.usable_bytes

    @property
    def mfu(self) -> float:
        return self.tokens_per_s_per_gpu / 20000

    @property
    def peak_at(self) -> tuple[str, str]:
        return ("backward", "model.layers.31.mlp")

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.job.tokens_per_rank / self.step_time_s

    @property
    def tokens_per_s_range(self) -> tuple[float, float] | None:
        return 0.9 * self.tokens_per_s_per_gpu, 1.2 * self.tokens_per_s_per_gpu

    @property
    def step_time_s(self) -> float:
        return self.compute_s + self.exposed_comm_s + self.exposed_offload_s + self.late_s

    @property
    def compute_s(self) -> float:
        again = {"none": 3.0, "selective-ops": 3.2, "every-2": 3.5, "full": 4.0}[self.job.activation_checkpointing]
        return again * self.job.tokens_per_rank / 30000 + self.step_s * (1 + self.job.accumulation)

    @property
    def exposed_comm_s(self) -> float:
        return (0.2 if self.job.strategy.sharded else 0.3) * (1 + self.job.accumulation) / 2


def formula(job: Job, **more: Any) -> Any:
    """About an 8 B model: 128 GiB of states, some GiB a sequence and micro-batch."""
    kept = {"none": 8.0, "selective-ops": 5.0, "every-2": 4.5, "full": 1.0}[job.activation_checkpointing]
    memory = {
        "param_shards": 32 * GIB // job.shard_ranks,
        "optimizer": 64 * GIB // job.shard_ranks,
        "grad_shards": (32 * GIB // job.shard_ranks) * (job.accumulation > 1),
        "reduce_slots": 0,
        "gathered_slots": (2 if job.strategy.reshards_after_forward else 16) * GIB,
        "activations": int(kept * GIB * job.micro_batch * job.seq_len / 2048),
    }
    for kind in job.elsewhere:
        memory[kind] //= 8  # its ring
    return Formula(job, memory, **more)


def report(**arguments: Any) -> PlanReport:
    """A report of a search on formulas, with everything that a report can have."""
    objective = Objective.TOKENS_PER_S
    found = search_space(arguments).sweeps
    candidates = [c for sweep in found for c in explore_sweep(sweep, formula, None, objective)]
    return PlanReport(
        title="Formula 8B: 8.0 B parameters",
        setting="8 x h100-sxm-80gb on 1 node, 2,048 tokens per sequence, bf16 (gradients and masters fp32), adamw, "
        "sdpa",
        exploration=ranked(candidates, objective, None),
        assumptions=(
            Assumption("usable bytes of a GPU", "79.1 GiB (https://example.org/data-sheet <measured>)"),
            Assumption("context", "1.0 GiB", "0.3 to 1.0 GiB were reported"),
        ),
        range_words="90% of 46 published runs on this device were between 10% slower and 20% faster than forecast",
        answers=("The smallest cluster that fits: 3 GPUs.", "The largest micro-batch that fits: 9 sequences."),
        timeline=Timeline(
            spans=(
                Span("compute", "mm", "block.0", StepPhase.FORWARD, 0.0, 0.010, 0),
                Span("compute", "mm", "block.1", StepPhase.FORWARD, 0.010, 0.015, 0),
                Span("compute", "mm", "block.1", StepPhase.BACKWARD, 0.020, 0.040, 0),
                Span("shard gathers", "all_gather", "block.1", StepPhase.FORWARD, 0.010, 0.020, 0),
            ),
            stalls=(Stall(0.015, 0.020, "block.1", "all_gather"),),
            step_time_s=0.040,
            host_s=0.040,
            late_s=0.0,
            bytes_sent=0.0,
            flops=0,
        ),
        config='[model.config]\nmodel_type = "llama"\n',
    )

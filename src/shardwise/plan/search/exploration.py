"""Outcomes of a search: which configurations fit, which is best, what limits each, and why the others do not fit."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace

from shardwise.errors import PlanError
from shardwise.plan.dry_run.job import Job
from shardwise.plan.simulate.forecast import Forecast
from shardwise.policy.kinds import MEMORY_WORDS

Evaluate = Callable[[Job], Forecast]

WAITING_SHARE = 0.2
"""A configuration is limited by the network, by host copies or by launches if it waits for that more than this share of
a step."""
LAUNCHES = "launches"


LARGEST_CLUSTER_NODES = 4096
"""The most nodes that the search for a cluster tries."""


class Objective(enum.Enum):
    """The criterion by which configurations are ordered."""

    TOKENS_PER_S = "tokens_per_s"
    """The most tokens per second and GPU."""
    MEMORY = "memory"
    """The least memory."""
    MICRO_BATCH = "micro_batch"
    """The largest micro-batch, then the most tokens per second."""

    @classmethod
    def parse(cls, value: Objective | str) -> Objective:
        """Return the member of this name, or the member itself. Raises PlanError for an unknown name."""
        if isinstance(value, cls):
            return value
        names = [member.value for member in cls]
        if value not in names:
            raise PlanError(f"objective={value!r}: must be one of {', '.join(names)}")
        return cls(value)

    def key(self, forecast: Forecast) -> tuple[float, ...]:
        """Return the sort key of a forecast: smaller is better. Ties go to the one that needs less memory; when ordered
        by memory, to the faster one."""
        if self is Objective.MEMORY:
            return (needed_bytes(forecast), -forecast.tokens_per_s_per_gpu)
        speed = (-forecast.tokens_per_s_per_gpu, needed_bytes(forecast))
        return speed if self is Objective.TOKENS_PER_S else (-forecast.job.micro_batch, *speed)


class Outcome(enum.Enum):
    """The outcome of a search for one configuration."""

    FITS = "fits"
    TOO_LARGE = "too large"
    """The forecast needs more memory than the GPU or a node's host has."""
    IMPLIED = "too large, as a smaller batch is"
    """Not forecast: a smaller micro-batch already has more live bytes than fit, and a larger one never has fewer."""
    SLOWER = "slower"
    """Not forecast: another that fits is known to be faster."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration and the outcome for it."""

    job: Job
    outcome: Outcome
    forecast: Forecast | None
    """None if the outcome follows without one."""
    limited_by: str
    """The bottleneck (memory, network, host, launches or compute) of one that fits; for the others, a phrase that says
    why they do not fit or are slower."""


@dataclass(frozen=True, slots=True)
class Exploration:
    """All configurations of a search."""

    candidates: tuple[Candidate, ...]
    """Those that fit first, best first; then those that do not, the nearest first; then those not forecast."""
    budget_bytes: int | None
    """Memory of one GPU, for everything. None: the device's usable bytes."""
    left_out: tuple[tuple[Job, str], ...] = ()
    """Like `SearchSpace.left_out`."""

    @property
    def fitting(self) -> list[Candidate]:
        """The configurations that fit, best first."""
        return [candidate for candidate in self.candidates if candidate.outcome is Outcome.FITS]

    @property
    def best(self) -> Forecast | None:
        """The best configuration's forecast; None if nothing fits."""
        return self.fitting[0].forecast if self.fitting else None


def needed_bytes(forecast: Forecast) -> int:
    """Return the bytes that a GPU must have in all: reserved bytes, the device's context and NCCL's buffers."""
    return forecast.reserved_memory_bytes + forecast.context_bytes + forecast.nccl_bytes


def available_bytes(forecast: Forecast, budget_bytes: int | None = None) -> int:
    """Return the bytes that a GPU has for `needed_bytes`: its usable bytes, or the budget if that is less."""
    return forecast.usable_bytes if budget_bytes is None else min(budget_bytes, forecast.usable_bytes)


def judge(forecast: Forecast, budget_bytes: int | None) -> Candidate:
    """Return the outcome of a forecast: whether it fits, and its bottleneck or why it does not."""
    needs, has = needed_bytes(forecast), available_bytes(forecast, budget_bytes)
    if needs > has:
        return Candidate(forecast.job, Outcome.TOO_LARGE, forecast, why_too_large(forecast, has))
    on_host = forecast.host_bytes_per_node
    if on_host > forecast.host_has_bytes:
        why = f"needs {gib(on_host)} of the {gib(forecast.host_has_bytes)} GiB of a node's host memory"
        return Candidate(forecast.job, Outcome.TOO_LARGE, forecast, why)
    waits = {
        "network": forecast.exposed_comm_s,
        "host": forecast.exposed_offload_s,
        LAUNCHES: forecast.late_s,
    }
    longest = max(waits, key=lambda name: waits[name])
    holds_back = waits[longest] > WAITING_SHARE * forecast.step_time_s
    return Candidate(forecast.job, Outcome.FITS, forecast, longest if holds_back else "compute")


def why_too_large(forecast: Forecast, has_bytes: int) -> str:
    """Return, in words, the bytes needed, the bytes available and the kind of memory that takes most."""
    kind, largest = max(forecast.memory.items(), key=lambda item: item[1])
    needs = needed_bytes(forecast)
    return f"needs {gib(needs)} of {gib(has_bytes)} GiB, of which {gib(largest)} for {MEMORY_WORDS[kind]}"


def ranked(candidates: Iterable[Candidate], objective: Objective, budget_bytes: int | None) -> Exploration:
    """Put candidates in order. One that was limited by compute is limited by memory if the same job with a larger
    batch does not fit."""
    everything = [(candidate, job_key(candidate.job)) for candidate in candidates]
    larger_fails = {key for candidate, key in everything if candidate.outcome in (Outcome.TOO_LARGE, Outcome.IMPLIED)}
    largest: dict[tuple[object, ...], int] = {}
    for candidate, key in everything:
        if candidate.outcome is Outcome.FITS:
            largest[key] = max(candidate.job.micro_batch, largest.get(key, 0))

    def order(candidate: Candidate) -> tuple[float, ...]:
        if candidate.forecast is None:
            return (2.0,)
        if candidate.outcome is Outcome.FITS:
            return (0.0, *objective.key(candidate.forecast))
        return (1.0, needed_bytes(candidate.forecast))

    settled = []
    for candidate, key in everything:
        is_last = candidate.job.micro_batch == largest.get(key) and key in larger_fails
        by_memory = candidate.outcome is Outcome.FITS and candidate.limited_by == "compute" and is_last
        settled.append(replace(candidate, limited_by="memory") if by_memory else candidate)
    return Exploration(tuple(sorted(settled, key=order)), budget_bytes)


def nothing_fits(exploration: Exploration, way_out: str = "") -> PlanError:
    """Return the error for a search in which nothing fits: it names the configuration nearest to fitting and what would
    help, `way_out` or else what the configuration shows."""
    nearest = next(candidate for candidate in exploration.candidates if candidate.forecast is not None)
    forecast, job = nearest.forecast, nearest.job
    assert forecast is not None
    has = available_bytes(forecast, exploration.budget_bytes)
    gpu = getattr(job.gpu, "name", job.gpu)
    remedies = "; ".join(filter(None, (_too_large_unit(forecast, has), way_out))) or ways_out(job)
    return PlanError(
        f"nothing fits {job.world_size} x {gpu}; the nearest configuration, {describe(job)}, "
        f"{why_too_large(forecast, has)}; {remedies}"
    )


def _too_large_unit(forecast: Forecast, has_bytes: int) -> str | None:
    """Say, if slots alone do not fit, which unit is the trouble and what would help: neither more devices nor offload
    make them smaller. None if they fit, or if the strategy keeps all gathered parameters."""
    gathered, reduced = (forecast.memory.get(kind, 0) for kind in ("gathered_slots", "reduce_slots"))
    if not forecast.job.strategy.reshards_after_forward or gathered + reduced <= has_bytes:
        return None
    facts = forecast.recording.facts
    sizes = facts.unit_bytes
    smaller = "use smaller --units" if facts.smaller_units else "split its largest module (no --units make it smaller)"
    return (
        f"the trouble is one unit, {max(sizes, key=sizes.__getitem__) or 'the root'}: slots of its size take "
        f"{gib(gathered)} GiB to gather and {gib(reduced)} GiB to reduce on any number of GPUs; reduce in fewer "
        f"bits (--precision bf16/bf16/fp32), {smaller}, or use a GPU with more memory"
    )


def ways_out(job: Job) -> str:
    """Return, in words, what to change so that a job may fit, as far as the job itself shows."""
    ways = []
    if job.micro_batch > 1:
        ways.append("a smaller micro-batch")
    if job.recomputation.every == 0:
        ways.append("activation checkpointing")
    strategy = job.strategy
    if job.engine_ranks > 1 and (not strategy.sharded or not strategy.reshards_after_forward or strategy.replicated):
        ways.append("full_shard")
    return f"use {', '.join([*ways, 'more GPUs'])} or a GPU with more memory"


def largest_micro_batch(evaluate: Evaluate, job: Job, budget_bytes: int | None = None) -> Forecast | None:
    """Find the largest micro-batch with which a job fits: double it until it does not fit, then bisect.

    Returns:
        Its forecast; None if not even one sequence fits.
    """

    def with_batch(size: int) -> Forecast | None:
        return _fitting(evaluate(replace(job, micro_batch=size)), budget_bytes)

    low, high, best = 0, 1, None
    while (found := with_batch(high)) is not None:
        best, low, high = found, high, high * 2
    return _bisect(low, high, best, with_batch, fits_below=True)


def smallest_cluster(
    evaluate: Evaluate, job: Job, budget_bytes: int | None = None, may_fit: Callable[[Job], bool] = lambda job: True
) -> Forecast | None:
    """Find the fewest GPUs on which a job fits: one, which needs no communicator; then more of a node, then whole
    nodes.

    Args:
        job: its `gpus_per_node` is a full node. Its `nodes`, its `shard_group` and a `reshard_after_forward` that is a
            number of ranks are ignored.
        budget_bytes: memory of one GPU, for everything. None: the device's usable bytes.
        may_fit: returns False for a job that is known not to fit; it is then not forecast.

    Returns:
        The forecast on that cluster; None if `LARGEST_CLUSTER_NODES` nodes are too few.
    """
    full = job.gpus_per_node
    resharding = job.reshard_after_forward if isinstance(job.reshard_after_forward, bool) else None

    def with_size(size: int) -> Forecast | None:
        """Return the forecast at this size, or None if it does not fit. Up to a full node, sizes count GPUs; from there
        on each adds a node."""
        nodes, gpus = (1, size) if size <= full else (size - full + 1, full)
        while nodes * gpus % job.ranks_of_code:  # the next size that the axes divide
            nodes, gpus = (nodes, gpus + 1) if gpus < full else (nodes + 1, gpus)
        smaller = replace(job, nodes=nodes, gpus_per_node=gpus, shard_group=None, reshard_after_forward=resharding)
        return _fitting(evaluate(smaller), budget_bytes) if may_fit(smaller) else None

    alone = with_size(1)
    if alone is not None:
        return alone
    low, nodes = 1, 1
    while (best := with_size(full + nodes - 1)) is None:
        low, nodes = full + nodes - 1, nodes * 2
        if nodes > LARGEST_CLUSTER_NODES:
            return None
    return _bisect(low, full + nodes - 1, best, with_size, fits_below=False)


def describe(job: Job) -> str:
    """Describe a job in a few words: strategy, batch, recomputation."""
    group = f" in groups of {job.shard_group}" if job.shard_group is not None else ""
    group += f", {axes}," if (axes := job.axes_of_code) else ""
    steps = f" x {job.accumulation}" if job.accumulation > 1 else ""
    mode = job.activation_checkpointing
    return f"{job.strategy.value}{group} with micro-batch {job.micro_batch}{steps}, {RECOMPUTES.get(mode, mode)}"


RECOMPUTES = {
    "none": "no recomputation",
    "full": "all blocks recomputed",
    "selective-ops": "cheap operations recomputed",
    "offload": "all blocks recomputed, with their inputs kept on the host",
}


def gib(nbytes: float) -> str:
    """Format bytes as GiB: one digit after the point, four for less than 0.1 GiB."""
    size = nbytes / 2**30
    return f"{size:,.1f}" if size >= 0.1 or not size else f"{size:.4f}"


def _bisect(
    low: int, high: int, best: Forecast | None, fitting: Callable[[int], Forecast | None], fits_below: bool
) -> Forecast | None:
    """Return the forecast of the size that fits next to one that does not.

    Args:
        low: fits if `fits_below`, otherwise does not.
        high: the opposite.
        best: the forecast of the end that fits; None if that is size 0.
        fitting: returns the forecast at a size, or None if it does not fit.
        fits_below: whether sizes fit up to some size (a batch) or from some size on (a cluster).
    """
    while high - low > 1:
        middle = (low + high) // 2
        found = fitting(middle)
        best = found or best
        low, high = (middle, high) if (found is not None) is fits_below else (low, middle)
    return best


def _fitting(forecast: Forecast, budget_bytes: int | None) -> Forecast | None:
    return forecast if judge(forecast, budget_bytes).outcome is Outcome.FITS else None


def job_key(job: Job) -> tuple[object, ...]:
    """Return a key that is the same for jobs that differ only in their batches. The GPU goes in by name, because a
    device may be an object that cannot be hashed."""
    alike = (getattr(job, field.name) for field in fields(job) if field.name not in _APART)
    return (str(getattr(job.gpu, "name", job.gpu)), *alike)


_APART = {"micro_batch", "accumulation", "gpu", "interconnect", "units"}

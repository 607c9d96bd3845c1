"""Bounds from existing forecasts for configurations not yet forecast: the least memory they need and their top speed.

Strategies and shard groups change which states a rank holds and how long it waits for the network. What its blocks
compute and save for backward is the same under all of them. So a forecast under one strategy bounds the others: their
states are known from the parameters, their activations from the forecast, and no step is shorter than its computation.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Self

from shardwise.plan.dry_run.job import Job
from shardwise.plan.search.exploration import Outcome, available_bytes, judge
from shardwise.plan.simulate.forecast import Forecast, nccl_bytes_of

_PADDING = 0.98
"""At least this part of a forecast's states is not padding."""
_ALIKE = 0.97
"""Times and activations taken over to another batch or strategy are multiplied by this, so that they stay lower bounds
although kernels and tensors are not exactly the same."""


class Bounds:
    """Forecasts of one model and setting, whatever their strategy, batch and recomputation."""

    def __init__(self, budget_bytes: int | None, forecasts: Iterable[Forecast] = ()) -> None:
        """
        Args:
            budget_bytes: memory of one GPU, for everything. None: the device's usable bytes.
            forecasts: those already made.
        """
        self.budget_bytes = budget_bytes
        self.forecasts = list(forecasts)

    def copy(self) -> Self:
        """Return a copy; what is added to it later is not added to this one."""
        return type(self)(self.budget_bytes, self.forecasts)

    def add(self, forecast: Forecast) -> None:
        """Add a forecast."""
        self.forecasts.append(forecast)

    @property
    def has_bytes(self) -> float:
        """Bytes that a GPU has available; infinite before the first forecast."""
        return available_bytes(self.forecasts[0], self.budget_bytes) if self.forecasts else inf

    @property
    def fitting(self) -> list[Forecast]:
        """The forecasts that fit."""
        return [f for f in self.forecasts if judge(f, self.budget_bytes).outcome is Outcome.FITS]

    @property
    def best_tokens_per_s(self) -> float:
        """Tokens per second and GPU of the fastest forecast that fits; 0 if none does."""
        return max((f.tokens_per_s_per_gpu for f in self.fitting), default=0.0)

    def may_fit(self, job: Job) -> bool:
        """Whether `least_bytes` are available."""
        return self.least_bytes(job) <= self.has_bytes

    def least_bytes(self, job: Job) -> float:
        """Return a lower bound of a job's memory: its states, the activations of its batch, and memory outside the
        allocator."""
        if not self.forecasts:
            return 0.0
        known = self.forecasts[0]
        return _states_bytes(known, job) + self._activations(job) + known.context_bytes + nccl_bytes_of(job)

    def most_tokens_per_s(self, job: Job) -> float:
        """Return an upper bound of a job's tokens per second and GPU: that of its computation alone, as a forecast
        under the same recomputation, or without any, shows it; infinite if there is none.

        The fixed part of a micro-batch (launches, kernels that do not fill the device, the optimizer's step) weighs
        less the larger the batch is. So a sequence of a smaller batch takes no less than one of a larger batch; and a
        larger batch as a whole takes no less than a smaller one.
        """
        least = 0.0
        for known in self.forecasts:
            alike = known.job.activation_checkpointing in ("none", job.activation_checkpointing)
            if alike and _computes_no_more(known.job, job):
                tokens = (
                    known.tokens_per_s_per_gpu * known.step_time_s * max(1, job.micro_batch / known.job.micro_batch)
                )
                least = max(least, _ALIKE * known.compute_s / tokens)
        return 1 / least if least else inf

    def _activations(self, job: Job) -> float:
        """Return a lower bound of the bytes of activations of a job's batch: those of a smaller batch under the same
        recomputation, or where all blocks recompute, which keeps least."""
        modes = {job.activation_checkpointing, *([] if job.recomputation.offloads else ["full"])}
        known = (f for f in self.forecasts if f.job.activation_checkpointing in modes)
        return _ALIKE * max((f.memory["activations"] for f in known if f.job.micro_batch <= job.micro_batch), default=0)


def _computes_no_more(known: Job, job: Job) -> bool:
    """Whether a micro-batch of `known` computes no longer than one of `job` with as many sequences.

    The optimizer's step takes longer the fewer ranks share it, and less per micro-batch the more micro-batches it
    serves. Accumulation adds gradients to those of earlier micro-batches: on slices that takes less time than the
    optimizer's step on them, on full-size gradients it takes more.
    """
    adds = known.accumulation > 1 and job.accumulation == 1 and known.strategy.has_full_gradients
    return known.shard_ranks >= job.shard_ranks and known.accumulation >= job.accumulation and not adds


def _states_bytes(known: Forecast, job: Job) -> float:
    """Return a lower bound of the bytes of masters, optimizer state and parameters that stay gathered."""
    kinds = ["param_shards"]
    if job.optimizer != "muon" or (known.job.shard_ranks, known.job.replicas) == (job.shard_ranks, job.replicas):
        kinds.append("optimizer")  # Muon's state is of whole matrices: ranks hold more or fewer of them
    larger = known.job.shard_ranks / job.shard_ranks
    # Offloaded kinds have only rings on the device, which may be no larger for larger slices.
    slices = sum(known.memory[kind] * (min(1.0, larger) if kind in job.elsewhere else larger) for kind in kinds)
    own_copy = job.shard_ranks > 1 or (job.precision.param or job.precision.master) != job.precision.master
    gathers = not job.strategy.reshards_after_forward and (own_copy or "param_shards" in job.elsewhere)
    return _PADDING * (slices + (sum(known.recording.facts.unit_bytes.values()) if gathers else 0))

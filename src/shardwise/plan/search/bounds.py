"""What forecasts say of configurations that were not forecast: the least memory and the most speed that these can have.

Strategies and shard groups change the states that a rank holds and how long it waits for the network. What its blocks
compute and keep for backward is the same under all. So a forecast under one strategy bounds the others: their states
are known from the parameters, their activations from the forecast, and no step is shorter than its computation.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Self

from shardwise.plan.dry_run.job import Job
from shardwise.plan.search.exploration import available_bytes, needed_bytes
from shardwise.plan.simulate.forecast import Forecast

_PADDING = 0.98
"""Of the states of a forecast: the part that is no padding, at least."""
_ALIKE = 0.97
"""Of what a computation takes, or activations hold: that at another batch or under another strategy, at least."""
_LARGER = 0.92
"""The same of the time of a token, where the micro-batch is larger than any that was forecast."""


class Knowledge:
    """Forecasts of one model and setting, whatever their strategy, batch and recomputation."""

    def __init__(self, budget_bytes: int | None, forecasts: Iterable[Forecast] = ()) -> None:
        """
        Args:
            budget_bytes: of one GPU, for everything. None: the device's usable bytes.
            forecasts: known from the beginning.
        """
        self.budget_bytes = budget_bytes
        self.forecasts = list(forecasts)

    def copy(self) -> Self:
        """One that learns by itself from here on."""
        return type(self)(self.budget_bytes, self.forecasts)

    def learn(self, forecast: Forecast) -> None:
        """Take a forecast in."""
        self.forecasts.append(forecast)

    @property
    def has_bytes(self) -> float:
        """Of a GPU, as far as that is known."""
        return available_bytes(self.forecasts[0], self.budget_bytes) if self.forecasts else inf

    @property
    def best_tokens_per_s(self) -> float:
        """Of a GPU, of what fits."""
        fitting = (f for f in self.forecasts if needed_bytes(f) <= self.has_bytes)
        return max((f.tokens_per_s_per_gpu for f in fitting), default=0.0)

    def least_bytes(self, job: Job) -> float:
        """What a job needs at least: its states, the activations of its batch, and what lies beside the allocator."""
        if not self.forecasts:
            return 0.0
        mode = job.activation_checkpointing
        leaner = [f for f in self.forecasts if f.job.activation_checkpointing == mode and _is_leaner(f.job, job)]
        known = leaner[-1] if leaner else self.forecasts[0]
        states = _states_bytes(known, job, at_its_peak=bool(leaner))
        return states + self._activations(job) + known.context_bytes + known.nccl_bytes

    def knows(self, mode: str) -> bool:
        """Whether activations are known under a kind of recomputation."""
        return any(f.job.activation_checkpointing == mode for f in self.forecasts)

    def most_tokens_per_s(self, job: Job) -> float:
        """What a job reaches at most, for each GPU: computation alone, never waiting."""
        own = self._token_s(job, job.activation_checkpointing)
        least = max(own, self._token_s(job, "none"))
        every = job.recomputation.every
        if every > 1 and not job.recomputation.selective:
            none, full = self._token_s(job, "none"), self._token_s(job, "full")
            least = max(least, none + max(0.0, full - none) / every)
        return 1 / least if least else inf

    def _activations(self, job: Job) -> float:
        """Bytes for a batch, on a straight line through those of two others under one strategy."""
        mode = job.activation_checkpointing
        least = 0.0
        known = [f for f in self.forecasts if f.job.activation_checkpointing == mode]
        for one in known:
            if one.job.micro_batch <= job.micro_batch:
                least = max(least, one.memory["activations"])
            for other in known:
                run = other.job.micro_batch - one.job.micro_batch
                same = one.job.strategy is other.job.strategy and one.peak_at[0] == other.peak_at[0]
                if run > 0 and same and other.job.micro_batch <= job.micro_batch:
                    rise = max(0, other.memory["activations"] - one.memory["activations"]) / run
                    least = max(least, other.memory["activations"] + rise * (job.micro_batch - other.job.micro_batch))
        return _ALIKE * least

    def _token_s(self, job: Job, mode: str) -> float:
        """Seconds of computation for a token, at least. 0 where none is known that bounds the job's: an optimizer's
        step takes the longer the fewer ranks share it, and the less often it comes the less it takes for a token."""
        least = 0.0
        for known in self.forecasts:
            of = known.job
            bounds = of.shard_ranks >= job.shard_ranks and of.accumulation >= job.accumulation
            if of.activation_checkpointing == mode and bounds:
                seconds = (known.step_time_s - known.exposed_comm_s) / known.step_time_s / known.tokens_per_s_per_gpu
                least = max(least, seconds * (_ALIKE if of.micro_batch >= job.micro_batch else _LARGER))
        return least


def _is_leaner(known: Job, job: Job) -> bool:
    """Whether everything that `known` holds at a moment of its step `job` holds as well, if not in smaller slices, and
    activations aside."""
    keeps = known.strategy.keeps_params or known.strategy.keeps_grads
    return known.shard_ranks >= job.shard_ranks and not keeps and known.accumulation <= job.accumulation


def _states_bytes(known: Forecast, job: Job, at_its_peak: bool) -> float:
    """Masters, optimizer's states and parameters that stay gathered; and what else a leaner job holds at its peak."""
    memory = known.memory
    kinds = ["param_shards", "optimizer", *(["grad_shards"] if at_its_peak else [])]
    slices = sum(memory[kind] for kind in kinds) * known.job.shard_ranks / job.shard_ranks
    own_copy = job.shard_ranks > 1 or (job.precision.param or job.precision.master) != job.precision.master
    gathered = sum(known.recording.facts.unit_bytes.values()) if job.strategy.keeps_params and own_copy else 0
    besides = 0
    if at_its_peak:
        gathered = max(gathered, memory["gathered_slots"])
        besides = memory["reduce_slots"] if own_copy else 0
    return _PADDING * (slices + gathered + besides)

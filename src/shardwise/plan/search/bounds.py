"""Bounds from existing forecasts for configurations not yet forecast: the least memory they need and their top speed.

Strategies and shard groups change which states a rank holds and how long it waits for the network. What its blocks
compute and save for backward is the same under all of them. So a forecast under one strategy bounds the others: their
states are known from the parameters, their activations from the forecast, and no step is shorter than its computation.

With offload, no step is shorter than its copies either: a slice is loaded equally often whatever the batch size, and
the copies of the optimizer's step overlap with no computation. What is offloaded still has rings on the device: they
count as in the forecast, or in proportion if the job's slices are smaller.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from math import inf
from typing import Self

from shardwise.plan.dry_run.job import Job
from shardwise.plan.search.exploration import Verdict, available_bytes, judge
from shardwise.plan.simulate.forecast import Forecast, nccl_bytes_of

_PADDING = 0.98
"""At least this part of a forecast's states is not padding."""
_ALIKE = 0.97
"""Times and activations taken over to another batch or strategy are multiplied by this, so that they stay lower bounds
although kernels and tensors are not exactly the same."""


class Knowledge:
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
        """Return a copy; what it learns later is not added to this one."""
        return type(self)(self.budget_bytes, self.forecasts)

    def learn(self, forecast: Forecast) -> None:
        """Add a forecast."""
        self.forecasts.append(forecast)

    @property
    def has_bytes(self) -> float:
        """Bytes that a GPU has available; infinite before the first forecast."""
        return available_bytes(self.forecasts[0], self.budget_bytes) if self.forecasts else inf

    @property
    def fitting(self) -> list[Forecast]:
        """The forecasts that fit."""
        return [f for f in self.forecasts if judge(f, self.budget_bytes).verdict is Verdict.FITS]

    @property
    def best_tokens_per_s(self) -> float:
        """Tokens per second and GPU of the fastest forecast that fits; 0 if none does."""
        return max((f.tokens_per_s_per_gpu for f in self.fitting), default=0.0)

    def least_bytes(self, job: Job) -> float:
        """Return a lower bound of a job's memory: its states, the activations of its batch, and memory outside the
        allocator."""
        if not self.forecasts:
            return 0.0
        mode = job.activation_checkpointing
        leaner = [f for f in self.forecasts if f.job.activation_checkpointing == mode and _is_leaner(f.job, job)]
        known = leaner[-1] if leaner else self.forecasts[0]
        states = _states_bytes(known, job, at_its_peak=bool(leaner))
        return states + self._activations(job) + known.context_bytes + nccl_bytes_of(job)

    def knows(self, mode: str) -> bool:
        """Whether there is a forecast under this kind of recomputation, so that its activations are known."""
        return any(f.job.activation_checkpointing == mode for f in self.forecasts)

    def most_tokens_per_s(self, job: Job) -> float:
        """Return an upper bound of a job's tokens per second and GPU: computation and copies overlap completely, except
        for the copies of the optimizer's step."""
        copies_s, step_copies_s = self._copies_token_s(job)
        least = max(self._computes_token_s(job), copies_s) + step_copies_s
        return 1 / least if least else inf

    def _computes_token_s(self, job: Job) -> float:
        """Return a lower bound of the seconds of computation per token, from forecasts under all kinds of
        recomputation."""
        own = self._token_s(job, job.activation_checkpointing)
        least = max(own, self._token_s(job, "none"))
        every = job.recomputation.every
        if every > 1 and not job.recomputation.selective:
            none, full = self._token_s(job, "none"), self._token_s(job, "full")
            least = max(least, none + max(0.0, full - none) / every)
        return least

    def _copies_token_s(self, job: Job) -> tuple[float, float]:
        """Return lower bounds of the seconds of offload copies per token: before the optimizer's step, and in it. A
        rank's slices are larger the fewer ranks share them. Parameters that stay gathered are loaded less often than
        those that do not."""
        before = after = 0.0
        for known in self.forecasts:
            tokens = _tokens(known) * job.micro_batch
            larger = known.job.shard_ranks / job.shard_ranks
            if larger >= 1 and _copies_no_more(known.job, job):
                before = max(before, _ALIKE * larger * known.copies_s / known.job.accumulation / tokens)
            if larger >= 1:
                after = max(after, _ALIKE * larger * known.step_copies_s / job.accumulation / tokens)
        return before, after

    def _activations(self, job: Job) -> float:
        """Return a lower bound of the bytes of activations of a job's batch. They are fewest where all blocks
        recompute; where only some do, the others save as much as without recomputation."""
        own, full = self._on_a_line(job, job.activation_checkpointing), self._on_a_line(job, "full")
        if job.recomputation.offloads:
            return own
        every = job.recomputation.every
        if every <= 1 or not self.forecasts:
            return max(own, full)
        blocks = max(1, self.forecasts[0].recording.facts.layers)
        recompute = -(-blocks // every) / blocks
        return max(own, full, full * recompute + self._on_a_line(job, "none") * (1 - recompute))

    def _on_a_line(self, job: Job, mode: str) -> float:
        """Return a lower bound of the bytes of activations of a job's batch under a kind of recomputation: those of a
        smaller batch, or extrapolated linearly from two smaller batches of one strategy; 0 if nothing is known."""
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
        """Return a lower bound of the seconds of computation per token; 0 if nothing is known.

        A micro-batch takes a fixed time (an optimizer's step, launches, kernels that do not fill the device) and an
        equal time for each further sequence. So the mean time of a sequence falls as batches grow, towards the time of
        a further sequence. A larger batch bounds a smaller one by its mean; a smaller batch bounds a larger one by its
        own time and the time of each further sequence. That is the shortest one between any two known batches: kernels
        fill the device in steps, so between two neighbours it may be half as long again as between batches far apart.
        """
        known = [f for f in self.forecasts if f.job.activation_checkpointing == mode and _computes_no_more(f.job, job)]
        further_s = [
            _further_sequence_s(first, last)
            for first, last in itertools.permutations(known, 2)
            if first.job.micro_batch < last.job.micro_batch and _on_one_line(first.job, last.job, job)
        ]
        least = 0.0
        for last in known:
            sequence_s = _micro_batch_s(last) / last.job.micro_batch
            further = job.micro_batch - last.job.micro_batch
            if further > 0:
                sequence_s = (_micro_batch_s(last) + further * min(further_s, default=0.0)) / job.micro_batch
            least = max(least, _ALIKE * sequence_s / _tokens(last))
        return least


def _computes_no_more(known: Job, job: Job) -> bool:
    """Whether a micro-batch of `known` computes no longer than one of `job` with as many sequences.

    The optimizer's step takes longer the fewer ranks share it, and less per micro-batch the more micro-batches it
    serves. Accumulation adds gradients to those of earlier micro-batches: on slices that takes less time than the
    optimizer's step on them, on full-size gradients it takes more.
    """
    adds = known.accumulation > 1 and job.accumulation == 1 and known.strategy.keeps_grads
    return known.shard_ranks >= job.shard_ranks and known.accumulation >= job.accumulation and not adds


def _copies_no_more(known: Job, job: Job) -> bool:
    """Whether `known` copies slices no more often per micro-batch than `job`, and offloads no more inputs of blocks."""
    seldom = known.strategy.keeps_params >= job.strategy.keeps_params and known.accumulation >= job.accumulation
    if job.offload is not None and job.offload.gradients is not None:  # the first micro-batch loads no sums to add to
        seldom = seldom and known.accumulation == job.accumulation
    inputs = known.recomputation.offloads
    return seldom and (not inputs or (job.recomputation.offloads and known.micro_batch <= job.micro_batch))


def _on_one_line(first: Job, last: Job, job: Job) -> bool:
    """Whether the time of a micro-batch grows linearly from `first` to `last` and on to `job`: both have one sharding,
    and either the same accumulation or, all three, the same number of sequences in a step."""
    sequences = {known.micro_batch * known.accumulation for known in (first, last, job)}
    alike = first.accumulation == last.accumulation or len(sequences) == 1
    sharding = (first.strategy, first.shard_ranks) == (last.strategy, last.shard_ranks)
    return sharding and alike and first.micro_batch <= last.micro_batch


def _further_sequence_s(first: Forecast, last: Forecast) -> float:
    """Return the seconds that each further sequence adds to a micro-batch, from a smaller one to a larger one."""
    further = last.job.micro_batch - first.job.micro_batch
    return max(0.0, _micro_batch_s(last) - _micro_batch_s(first)) / further


def _micro_batch_s(known: Forecast) -> float:
    """Return the seconds of computation of a micro-batch, including its part of the optimizer's step."""
    return known.compute_s / known.job.accumulation


def _tokens(known: Forecast) -> float:
    """Return the tokens of a sequence."""
    return known.tokens_per_s_per_gpu * known.step_time_s / known.job.micro_batch / known.job.accumulation


def _is_leaner(known: Job, job: Job) -> bool:
    """Whether at each moment of a step `job` holds at least everything that `known` holds, in slices at least as large,
    activations aside."""
    keeps = known.strategy.keeps_params or known.strategy.keeps_grads
    return known.shard_ranks >= job.shard_ranks and not keeps and known.accumulation <= job.accumulation


def _states_bytes(known: Forecast, job: Job, at_its_peak: bool) -> float:
    """Return a lower bound of the bytes of masters, optimizer state and parameters that stay gathered; with
    `at_its_peak`, also of the gradients and slots that `known`, a leaner job, holds at its peak."""
    memory = known.memory
    kinds = ["param_shards", *(["grad_shards"] if at_its_peak else [])]
    if job.optimizer != "muon" or (known.job.shard_ranks, known.job.replicas) == (job.shard_ranks, job.replicas):
        kinds.append("optimizer")  # Muon's state is of whole matrices: ranks hold more or fewer of them
    elsewhere = job.elsewhere
    larger = known.job.shard_ranks / job.shard_ranks
    # Offloaded kinds have only rings on the device, which may be no larger for larger slices.
    slices = sum(memory[kind] * (min(1.0, larger) if kind in elsewhere else larger) for kind in kinds)
    own_copy = job.shard_ranks > 1 or (job.precision.param or job.precision.master) != job.precision.master
    has_slots = own_copy or "param_shards" in elsewhere
    gathered = sum(known.recording.facts.unit_bytes.values()) if job.strategy.keeps_params and has_slots else 0
    besides = 0
    if at_its_peak:
        gathered = max(gathered, memory["gathered_slots"])
        besides = memory["reduce_slots"] if own_copy else 0
    return _PADDING * (slices + gathered + besides)

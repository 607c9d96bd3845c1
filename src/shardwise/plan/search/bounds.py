"""What forecasts say of configurations that were not forecast: the least memory and the most speed that these can have.

Strategies and shard groups change the states that a rank holds and how long it waits for the network. What its blocks
compute and keep for backward is the same under all. So a forecast under one strategy bounds the others: their states
are known from the parameters, their activations from the forecast, and no step is shorter than its computation.

With offload, no step is shorter than its copies either: a slice comes as often however large the batch is, and what the
optimizer's step brings and takes has nothing left to hide behind. Rings lie on every device, if not smaller ones.
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
"""Of the states of a forecast: the part that is no padding, at least."""
_ALIKE = 0.97
"""Of what a computation takes, or activations hold: that at another batch or under another strategy, at least."""


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
    def fitting(self) -> list[Forecast]:
        """What fits."""
        return [f for f in self.forecasts if judge(f, self.budget_bytes).verdict is Verdict.FITS]

    @property
    def best_tokens_per_s(self) -> float:
        """Of a GPU, of what fits."""
        return max((f.tokens_per_s_per_gpu for f in self.fitting), default=0.0)

    def least_bytes(self, job: Job) -> float:
        """What a job needs at least: its states, the activations of its batch, and what lies beside the allocator."""
        if not self.forecasts:
            return 0.0
        mode = job.activation_checkpointing
        leaner = [f for f in self.forecasts if f.job.activation_checkpointing == mode and _is_leaner(f.job, job)]
        known = leaner[-1] if leaner else self.forecasts[0]
        states = _states_bytes(known, job, at_its_peak=bool(leaner))
        return states + self._activations(job) + known.context_bytes + nccl_bytes_of(job)

    def knows(self, mode: str) -> bool:
        """Whether activations are known under a kind of recomputation."""
        return any(f.job.activation_checkpointing == mode for f in self.forecasts)

    def most_tokens_per_s(self, job: Job) -> float:
        """What a job reaches at most, for each GPU: computation alone or copies alone, never waiting for each other."""
        copies_s, step_copies_s = self._copies_token_s(job)
        least = max(self._computes_token_s(job), copies_s) + step_copies_s
        return 1 / least if least else inf

    def _computes_token_s(self, job: Job) -> float:
        """Seconds of computation for a token, at least, by what is known of all kinds of recomputation."""
        own = self._token_s(job, job.activation_checkpointing)
        least = max(own, self._token_s(job, "none"))
        every = job.recomputation.every
        if every > 1 and not job.recomputation.selective:
            none, full = self._token_s(job, "none"), self._token_s(job, "full")
            least = max(least, none + max(0.0, full - none) / every)
        return least

    def _copies_token_s(self, job: Job) -> tuple[float, float]:
        """Seconds of copies for a token, at least: ahead of the optimizer's step, and in it. A rank's slices are the
        larger the fewer ranks share them. Parameters that stay gathered come less often than those that do not."""
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
        """Bytes for a batch, at least. Least is kept where all blocks recompute; where some do, the others keep what
        they would keep without."""
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
        """Activations of a job's batch under a kind of recomputation, on a straight line through those of two others
        under one strategy."""
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
        """Seconds of computation for a token, at least; 0 where nothing is known.

        A micro-batch takes a fixed time (an optimizer's step, launches, kernels that do not fill the device) and a time
        for each sequence, which the next sequence takes too. So the mean time of a sequence falls as batches grow, down
        to what further sequences take. A larger batch bounds a smaller one by its mean, a smaller one a larger by that:
        the least that is known between any two batches, since kernels fill the device in steps, and between two
        neighbours a sequence may take half as long again as between two that are far apart.
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
    """Whether a micro-batch of the one computes no longer than an equal one of the other: an optimizer's step takes the
    longer the fewer ranks share it, and the less often it comes the less it takes for a micro-batch. Adding to slices
    of gradients takes less than stepping on it; to whole ones more, and only micro-batches of several add."""
    adds = known.accumulation > 1 and job.accumulation == 1 and known.strategy.keeps_grads
    return known.shard_ranks >= job.shard_ranks and known.accumulation >= job.accumulation and not adds


def _copies_no_more(known: Job, job: Job) -> bool:
    """Whether slices come as seldom for a micro-batch of the one as for one of the other, or more so; and no more
    inputs of blocks go."""
    seldom = known.strategy.keeps_params >= job.strategy.keeps_params and known.accumulation >= job.accumulation
    if job.offload is not None and job.offload.gradients is not None:  # the first micro-batch finds none to add to
        seldom = seldom and known.accumulation == job.accumulation
    inputs = known.recomputation.offloads
    return seldom and (not inputs or (job.recomputation.offloads and known.micro_batch <= job.micro_batch))


def _on_one_line(first: Job, last: Job, job: Job) -> bool:
    """Whether the time of a micro-batch rises evenly from one to the other and on to `job`: under one strategy, in as
    many micro-batches, or where all three have as many sequences."""
    sequences = {known.micro_batch * known.accumulation for known in (first, last, job)}
    alike = first.accumulation == last.accumulation or len(sequences) == 1
    sharding = (first.strategy, first.shard_ranks) == (last.strategy, last.shard_ranks)
    return sharding and alike and first.micro_batch <= last.micro_batch


def _further_sequence_s(first: Forecast, last: Forecast) -> float:
    """Seconds that each further sequence adds to a micro-batch, from a smaller one to a larger one."""
    further = last.job.micro_batch - first.job.micro_batch
    return max(0.0, _micro_batch_s(last) - _micro_batch_s(first)) / further


def _micro_batch_s(known: Forecast) -> float:
    """Seconds that a micro-batch computes, its part of the optimizer's step included."""
    return known.compute_s / known.job.accumulation


def _tokens(known: Forecast) -> float:
    """Of a sequence."""
    return known.tokens_per_s_per_gpu * known.step_time_s / known.job.micro_batch / known.job.accumulation


def _is_leaner(known: Job, job: Job) -> bool:
    """Whether everything that `known` holds at a moment of its step `job` holds as well, if not in smaller slices, and
    activations aside."""
    keeps = known.strategy.keeps_params or known.strategy.keeps_grads
    return known.shard_ranks >= job.shard_ranks and not keeps and known.accumulation <= job.accumulation


def _states_bytes(known: Forecast, job: Job, at_its_peak: bool) -> float:
    """Masters, optimizer's states and parameters that stay gathered; and what else a leaner job holds at its peak."""
    memory = known.memory
    kinds = ["param_shards", *(["grad_shards"] if at_its_peak else [])]
    if job.optimizer != "muon" or (known.job.shard_ranks, known.job.replicas) == (job.shard_ranks, job.replicas):
        kinds.append("optimizer")  # Muon's is of whole matrices, more or fewer of them on a rank
    elsewhere = job.elsewhere
    larger = known.job.shard_ranks / job.shard_ranks
    slices = sum(memory[kind] * (min(1.0, larger) if kind in elsewhere else larger) for kind in kinds)  # or rings
    own_copy = job.shard_ranks > 1 or (job.precision.param or job.precision.master) != job.precision.master
    has_slots = own_copy or "param_shards" in elsewhere
    gathered = sum(known.recording.facts.unit_bytes.values()) if job.strategy.keeps_params and has_slots else 0
    besides = 0
    if at_its_peak:
        gathered = max(gathered, memory["gathered_slots"])
        besides = memory["reduce_slots"] if own_copy else 0
    return _PADDING * (slices + gathered + besides)

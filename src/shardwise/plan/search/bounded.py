"""A search with few forecasts: bounds rule out most configurations, and the largest batch of the others is bisected.

A *column* is all batches of one strategy, shard group and kind of recomputation. The strategy that shards most comes
first, because the bounds of all others follow from it. Columns of one round do not use each other's forecasts, so the
result of a search depends neither on the number of processes nor on their speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from shardwise.plan.dry_run.job import Job
from shardwise.plan.search.bounds import Knowledge
from shardwise.plan.search.exploration import (
    Candidate,
    Evaluate,
    Objective,
    Verdict,
    family_key,
    gib,
    judge,
    needed_bytes,
)
from shardwise.plan.search.space import Family
from shardwise.policy.strategy import Strategy

_STARTS = 2
"""Batches that are forecast before the bounds of a kind of recomputation are trusted. From the recordings of two
batches, both from micro-batch 2 on, those of the other batches are made (`scaling`)."""


@dataclass(frozen=True, slots=True)
class Task:
    """Columns of a family, searched one after the other; each uses the forecasts of those before it."""

    family: Family
    modes: tuple[str, ...]

    def run(self, evaluate: Evaluate, knowledge: Knowledge, objective: Objective) -> Iterator[Candidate]:
        """Yield every configuration with its verdict, and add the forecasts to `knowledge`."""
        for mode in self.modes:
            for batches in _chains(self.family.batches):
                jobs = [self.family.job(mode, *batch) for batch in batches]
                yield from _Column(jobs, evaluate, knowledge, objective).search()


def rounds(families: Sequence[Family]) -> Iterator[list[Task]]:
    """Yield the tasks of a search, round by round; a round may use what the rounds before it found.

    Args:
        families: of one setting: they differ only in strategy and shard group.
    """
    lean = leanest(families)
    modes = lean.modes
    first = tuple(dict.fromkeys((modes[0], "full" if "full" in modes else modes[-1])))
    yield [Task(lean, (mode,)) for mode in first]
    yield [Task(lean, (mode,)) for mode in modes if mode not in first]
    yield [Task(family, family.modes) for family in families if family is not lean]


def leanest(families: Sequence[Family]) -> Family:
    """Return the family of the strategy that shards most."""
    return max(families, key=_leanness)


def least_job(families: Sequence[Family]) -> Job:
    """Return the job that needs the least memory, as far as that can be told without a forecast."""
    family = leanest(families)
    mode = next((mode for mode in ("offload", "full") if mode in family.modes), family.modes[-1])
    return family.job(mode, *min(family.batches))


def by_setting(families: Sequence[Family]) -> list[list[Family]]:
    """Group the families that differ only in strategy and shard group."""
    groups: dict[object, list[Family]] = {}
    for family in families:
        alike = replace(family.base, strategy=Strategy.NO_SHARD, shard_group=None, reshard_after_forward=None)
        groups.setdefault((family_key(alike), str(family.base.interconnect)), []).append(family)
    return list(groups.values())


def _leanness(family: Family) -> tuple[int, bool, bool]:
    job = family.base
    return job.shard_ranks, not job.strategy.keeps_params, not job.strategy.keeps_grads


def _chains(batches: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Split batches into chains along which memory grows: one chain for each accumulation. If every batch has another
    accumulation (they follow from a global batch), one chain for those that accumulate, which hold accumulated
    gradients as well, and one for the batch that does not."""
    alone = len({accumulation for _, accumulation in batches}) == len(batches)
    chains: dict[int, list[tuple[int, int]]] = {}
    for micro_batch, accumulation in sorted(batches):
        chains.setdefault(min(accumulation, 2) if alone else accumulation, []).append((micro_batch, accumulation))
    return list(chains.values())


@dataclass
class _Column:
    jobs: list[Job]
    """Sorted by micro-batch, the smallest first."""
    evaluate: Evaluate
    knowledge: Knowledge
    objective: Objective
    found: dict[int, Candidate] = field(default_factory=dict)
    """The configurations judged from a forecast, by index in `jobs`."""

    def search(self) -> Iterator[Candidate]:
        """Yield every job of the column with its verdict, by bisection: `low` is the last index known to fit, `high`
        the last that may fit."""
        without = self._without_recomputation()
        low, high = without, len(self.jobs) - 1
        best = self.knowledge.best_tokens_per_s  # of other columns: in this one, the largest that fits is best
        beaten = ""
        while True:
            high = max([low, *(n for n in range(low + 1, high + 1) if self._may_fit(n))])
            if high == low:
                break
            beaten = self._beaten(range(low + 1, high + 1), best)
            if beaten:
                break
            place = self._next(low, high)
            candidate = self.found[place] = judge(self.evaluate(self.jobs[place]), self.knowledge.budget_bytes)
            assert candidate.forecast is not None
            self.knowledge.learn(candidate.forecast)
            yield candidate
            low, high = (place, high) if candidate.verdict is Verdict.FITS else (low, place - 1)
        for place, job in enumerate(self.jobs):
            if place in self.found:
                continue
            if place > high:
                yield Candidate(job, Verdict.IMPLIED, None, self._why_not(place))
            elif place <= without:
                yield Candidate(job, Verdict.SLOWER, None, "fits without recomputation, which is faster")
            else:
                yield Candidate(job, Verdict.SLOWER, None, beaten if place > low else "a larger micro-batch fits")

    def _without_recomputation(self) -> int:
        """Return the index of the last job that is known to fit without recomputation, which is faster; -1 if there is
        none. `explore_family` has the same rule."""
        if self.objective is not Objective.TOKENS_PER_S or not self.jobs[0].recomputation.every:
            return -1
        fitting = [forecast.job for forecast in self.knowledge.fitting]
        bare = [replace(job, activation_checkpointing="none") for job in self.jobs]
        return max((place for place, job in enumerate(bare) if job in fitting), default=-1)

    def _may_fit(self, place: int) -> bool:
        return self.knowledge.least_bytes(self.jobs[place]) <= self.knowledge.has_bytes

    def _next(self, low: int, high: int) -> int:
        """Return the index to forecast next.

        While fewer than `_STARTS` are forecast under a kind of recomputation that was unknown: the smallest micro-batch
        above 1. Before any other first forecast: `high`. Otherwise the last index that fits if its need exceeds its
        bound by as much as that of the forecast nearest to `high` did; `low + 1` if none does.
        """
        mode = self.jobs[0].activation_checkpointing
        if len(self.found) < _STARTS and (self.found or not self.knowledge.knows(mode)):
            starts = [n for n in range(low + 1, high + 1) if self.jobs[n].micro_batch > 1]
            return starts[0] if starts else high
        if not self.found:
            return high
        forecast = self.found[min(self.found, key=lambda n: abs(n - high))].forecast
        assert forecast is not None
        more = needed_bytes(forecast) - self.knowledge.least_bytes(forecast.job)
        has = self.knowledge.has_bytes
        fitting = [n for n in range(low + 1, high + 1) if self.knowledge.least_bytes(self.jobs[n]) + more <= has]
        return fitting[-1] if fitting else low + 1

    def _beaten(self, places: range, best: float) -> str:
        """Return why none of the jobs at these indices can be the best; "" if one may be."""
        if self.objective is not Objective.TOKENS_PER_S:
            return ""
        most = max(self.knowledge.most_tokens_per_s(self.jobs[place]) for place in places)
        return f"computes at most {most:,.0f} tokens/s, which is less than the best" if most <= best else ""

    def _why_not(self, place: int) -> str:
        smaller = [n for n, c in self.found.items() if n < place and c.verdict is Verdict.TOO_LARGE]
        if smaller:
            return f"does not fit, because micro-batch {self.jobs[smaller[-1]].micro_batch} does not"
        least = self.knowledge.least_bytes(self.jobs[place])
        return f"needs at least {gib(least)} of {gib(self.knowledge.has_bytes)} GiB"

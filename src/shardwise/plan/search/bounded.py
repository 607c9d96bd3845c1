"""A search that forecasts little: bounds rule most configurations out, and the largest batch of the rest is bisected.

A *column* is all batches of one strategy, shard group and kind of recomputation. The strategy that shards most comes
first, because the bounds of all others follow from it. Columns of one round do not know of each other, so that what a
search finds depends neither on the number of processes nor on their speed.
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
"""Batches that are forecast before the bounds of a kind of recomputation are believed; from micro-batch 2 on the
recordings of others are made from theirs."""


@dataclass(frozen=True, slots=True)
class Task:
    """Columns of a family, one after the other; each knows of those before it."""

    family: Family
    modes: tuple[str, ...]

    def run(self, evaluate: Evaluate, knowledge: Knowledge, objective: Objective) -> Iterator[Candidate]:
        """Every configuration with its verdict. `knowledge` learns."""
        for mode in self.modes:
            for batches in _chains(self.family.batches):
                jobs = [self.family.job(mode, *batch) for batch in batches]
                yield from _Column(jobs, evaluate, knowledge, objective).search()


def rounds(families: Sequence[Family]) -> Iterator[list[Task]]:
    """The tasks of a search; each round may know of what the ones before it found.

    Args:
        families: of one setting: they differ in strategy and shard group alone.
    """
    lean = leanest(families)
    modes = lean.modes
    first = tuple(dict.fromkeys((modes[0], "full" if "full" in modes else modes[-1])))
    yield [Task(lean, (mode,)) for mode in first]
    yield [Task(lean, (mode,)) for mode in modes if mode not in first]
    yield [Task(family, family.modes) for family in families if family is not lean]


def leanest(families: Sequence[Family]) -> Family:
    """The one of the strategy that shards most."""
    return max(families, key=_leanness)


def least_job(families: Sequence[Family]) -> Job:
    """The job that needs the least memory, as far as one can tell without a forecast."""
    family = leanest(families)
    mode = next((mode for mode in ("offload", "full") if mode in family.modes), family.modes[-1])
    return family.job(mode, *min(family.batches))


def by_setting(families: Sequence[Family]) -> list[list[Family]]:
    """Families that differ in strategy and shard group alone, together."""
    groups: dict[object, list[Family]] = {}
    for family in families:
        alike = replace(family.base, strategy=Strategy.NO_SHARD, shard_group=None, reshard_after_forward=None)
        groups.setdefault((family_key(alike), str(family.base.interconnect)), []).append(family)
    return list(groups.values())


def _leanness(family: Family) -> tuple[int, bool, bool]:
    job = family.base
    return job.shard_ranks, not job.strategy.keeps_params, not job.strategy.keeps_grads


def _chains(batches: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Batches in runs that need the more memory the further they are: those of one accumulation; or, where each has its
    own, those that accumulate (gradients wait besides) and the one that does not."""
    alone = len({accumulation for _, accumulation in batches}) == len(batches)
    chains: dict[int, list[tuple[int, int]]] = {}
    for micro_batch, accumulation in sorted(batches):
        chains.setdefault(min(accumulation, 2) if alone else accumulation, []).append((micro_batch, accumulation))
    return list(chains.values())


@dataclass
class _Column:
    jobs: list[Job]
    """The smallest micro-batch first."""
    evaluate: Evaluate
    knowledge: Knowledge
    objective: Objective
    found: dict[int, Candidate] = field(default_factory=dict)
    """By place among the jobs."""

    def search(self) -> Iterator[Candidate]:
        """Bisect: `low` is the last place that fits, `high` the last that may."""
        without = self._without_recomputation()
        low, high = without, len(self.jobs) - 1
        best = self.knowledge.best_tokens_per_s  # of others: its own largest that fits is this column's best
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
                yield Candidate(job, Verdict.SLOWER, None, "fits without recomputing, which is faster")
            else:
                yield Candidate(job, Verdict.SLOWER, None, beaten if place > low else "a larger micro-batch fits")

    def _without_recomputation(self) -> int:
        """The last place that is known to fit when nothing is recomputed, which is faster; -1 for none. As the grid
        has it."""
        if self.objective is not Objective.TOKENS_PER_S or not self.jobs[0].recomputation.every:
            return -1
        fitting = [forecast.job for forecast in self.knowledge.fitting]
        bare = [replace(job, activation_checkpointing="none") for job in self.jobs]
        return max((place for place, job in enumerate(bare) if job in fitting), default=-1)

    def _may_fit(self, place: int) -> bool:
        return self.knowledge.least_bytes(self.jobs[place]) <= self.knowledge.has_bytes

    def _next(self, low: int, high: int) -> int:
        """Where to look next: the last place that fits if a place not forecast needs as much more than its bound as the
        nearest that was; the last that may fit where there is none."""
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
        """Why none of these places can win; nothing where one can."""
        if self.objective is not Objective.TOKENS_PER_S:
            return ""
        most = max(self.knowledge.most_tokens_per_s(self.jobs[place]) for place in places)
        return f"computes at most {most:,.0f} tokens/s, which is less than the best" if most <= best else ""

    def _why_not(self, place: int) -> str:
        smaller = [n for n, c in self.found.items() if n < place and c.verdict is Verdict.TOO_LARGE]
        if smaller:
            return f"as micro-batch {self.jobs[smaller[-1]].micro_batch}, or more"
        least = self.knowledge.least_bytes(self.jobs[place])
        return f"needs at least {gib(least)} of {gib(self.knowledge.has_bytes)} GiB"

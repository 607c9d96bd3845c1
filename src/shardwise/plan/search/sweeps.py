"""Which jobs of a sweep are forecast: all that need it, or, by bounds, only those that may be the best.

A search by bounds takes the strategy that shards most first, because the bounds of all others follow from it. Sweeps of
one round do not use each other's forecasts, so the result of a search depends neither on the number of processes nor on
their speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from shardwise.fsdp.strategy import Strategy
from shardwise.plan.dry_run.job import Job
from shardwise.plan.search.bounds import Bounds
from shardwise.plan.search.exploration import (
    Candidate,
    Evaluate,
    Objective,
    Outcome,
    available_bytes,
    gib,
    job_key,
    judge,
)
from shardwise.plan.search.space import Sweep
from shardwise.plan.simulate.forecast import Forecast


def explore_sweep(
    sweep: Sweep, evaluate: Evaluate, budget_bytes: int | None, objective: Objective
) -> Iterator[Candidate]:
    """Judge a sweep's configurations one after the other, and forecast only those that need it.

    Two exact rules save forecasts. Live bytes do not fall when the micro-batch grows, so once live bytes alone exceed
    the budget, nothing larger fits. Recomputation adds kernels to the same order of events, so it is never faster than
    the same batch without it: if that batch fits, a search for speed does not forecast the recomputing one.
    """
    fitting: set[tuple[int, int]] = set()
    for mode in sweep.modes:
        hopeless: list[Job] = []
        for batch in sweep.batches:
            job = sweep.job(mode, *batch)
            smaller = next((other for other in hopeless if _implies(other, job)), None)
            if smaller is not None:
                yield Candidate(
                    job, Outcome.IMPLIED, None, f"does not fit, because micro-batch {smaller.micro_batch} does not"
                )
            elif mode != "none" and batch in fitting and objective is Objective.TOKENS_PER_S:
                yield Candidate(job, Outcome.SLOWER, None, "fits without recomputation, which is faster")
            else:
                candidate = judge(evaluate(job), budget_bytes)
                if candidate.outcome is Outcome.FITS and mode == "none":
                    fitting.add(batch)
                if candidate.forecast is not None and _is_hopeless(candidate.forecast, budget_bytes):
                    hopeless.append(job)
                yield candidate


def _is_hopeless(forecast: Forecast, budget_bytes: int | None) -> bool:
    """Whether live bytes alone exceed the memory, before any fragmentation."""
    live = forecast.peak_memory_bytes + forecast.context_bytes + forecast.nccl_bytes
    return live > available_bytes(forecast, budget_bytes)


def _implies(smaller: Job, larger: Job) -> bool:
    """Whether the live bytes of `smaller` are a lower bound of those of `larger`. Accumulated gradients are held from
    the second micro-batch on, so a job that accumulates is no bound for one that does not."""
    return smaller.micro_batch <= larger.micro_batch and (smaller.accumulation == 1 or larger.accumulation > 1)


# By bounds ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """The batch sweeps of some kinds of recomputation, one after the other; each uses the forecasts of those before
    it."""

    sweep: Sweep
    modes: tuple[str, ...]

    def run(self, evaluate: Evaluate, bounds: Bounds, objective: Objective) -> Iterator[Candidate]:
        """Yield every configuration with its outcome, and add the forecasts to `bounds`."""
        for mode in self.modes:
            for batches in _chains(self.sweep.batches):
                jobs = [self.sweep.job(mode, *batch) for batch in batches]
                yield from _BatchSweep(jobs, evaluate, bounds, objective).run()


def rounds(sweeps: Sequence[Sweep]) -> Iterator[list[Task]]:
    """Yield the tasks of a search, round by round; a round may use what the rounds before it found.

    Args:
        sweeps: of one setting: they differ only in strategy and shard group.
    """
    lean = leanest(sweeps)
    modes = lean.modes
    first = tuple(dict.fromkeys((modes[0], "full" if "full" in modes else modes[-1])))
    yield [Task(lean, (mode,)) for mode in first]
    yield [Task(lean, (mode,)) for mode in modes if mode not in first]
    yield [Task(sweep, sweep.modes) for sweep in sweeps if sweep is not lean]


def leanest(sweeps: Sequence[Sweep]) -> Sweep:
    """Return the sweep of the strategy that shards most."""
    return max(sweeps, key=_leanness)


def least_job(sweeps: Sequence[Sweep]) -> Job:
    """Return the job that needs the least memory, as far as that can be told without a forecast."""
    sweep = leanest(sweeps)
    mode = next((mode for mode in ("offload", "full") if mode in sweep.modes), sweep.modes[-1])
    return sweep.job(mode, *min(sweep.batches))


def by_setting(sweeps: Sequence[Sweep]) -> list[list[Sweep]]:
    """Group the sweeps that differ only in strategy and shard group."""
    groups: dict[object, list[Sweep]] = {}
    for sweep in sweeps:
        alike = replace(sweep.base, strategy=Strategy.FULL_SHARD, shard_group=None, reshard_after_forward=None)
        groups.setdefault((job_key(alike), str(sweep.base.interconnect)), []).append(sweep)
    return list(groups.values())


def _leanness(sweep: Sweep) -> tuple[int, bool, bool]:
    job = sweep.base
    return job.shard_ranks, job.strategy.reshards_after_forward, not job.strategy.has_full_gradients


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
class _BatchSweep:
    """Jobs that differ only in their batches. The largest that fits is taken for the best."""

    jobs: list[Job]
    """Sorted by micro-batch, the smallest first."""
    evaluate: Evaluate
    bounds: Bounds
    objective: Objective
    found: dict[int, Candidate] = field(default_factory=dict)
    """The configurations judged from a forecast, by index in `jobs`."""

    def run(self) -> Iterator[Candidate]:
        """Yield every job with its outcome, by bisection: `low` is the last index known to fit, `high` the last that
        may fit."""
        without = self._without_recomputation()
        low, high = without, len(self.jobs) - 1
        best = self.bounds.best_tokens_per_s  # of other batch sweeps: in this one, the largest that fits is best
        beaten = ""
        while not beaten:
            high = max([low, *(n for n in range(low + 1, high + 1) if self.bounds.may_fit(self.jobs[n]))])
            if high == low:
                break
            beaten = self._beaten(range(low + 1, high + 1), best)
            if not beaten:
                place = (low + high + 1) // 2
                candidate = self.found[place] = judge(self.evaluate(self.jobs[place]), self.bounds.budget_bytes)
                assert candidate.forecast is not None
                self.bounds.add(candidate.forecast)
                yield candidate
                low, high = (place, high) if candidate.outcome is Outcome.FITS else (low, place - 1)
        for place, job in enumerate(self.jobs):
            if place in self.found:
                continue
            if place > high:
                yield Candidate(job, Outcome.IMPLIED, None, self._why_not(place))
            elif place <= without:
                yield Candidate(job, Outcome.SLOWER, None, "fits without recomputation, which is faster")
            else:
                yield Candidate(job, Outcome.SLOWER, None, beaten if place > low else "a larger micro-batch fits")

    def _without_recomputation(self) -> int:
        """Return the index of the last job that is known to fit without recomputation, which is faster; -1 if there is
        none. `explore_sweep` has the same rule."""
        if self.objective is not Objective.TOKENS_PER_S or not self.jobs[0].recomputation.every:
            return -1
        fitting = [forecast.job for forecast in self.bounds.fitting]
        bare = [replace(job, activation_checkpointing="none") for job in self.jobs]
        return max((place for place, job in enumerate(bare) if job in fitting), default=-1)

    def _beaten(self, places: range, best: float) -> str:
        """Return why none of the jobs at these indices can be the best; "" if one may be."""
        if self.objective is not Objective.TOKENS_PER_S:
            return ""
        most = max(self.bounds.most_tokens_per_s(self.jobs[place]) for place in places)
        return f"computes at most {most:,.0f} tokens/s, which is less than the best" if most <= best else ""

    def _why_not(self, place: int) -> str:
        smaller = [n for n, c in self.found.items() if n < place and c.outcome is Outcome.TOO_LARGE]
        if smaller:
            return f"does not fit, because micro-batch {self.jobs[smaller[-1]].micro_batch} does not"
        least = self.bounds.least_bytes(self.jobs[place])
        return f"needs at least {gib(least)} of {gib(self.bounds.has_bytes)} GiB"

"""Which of the configurations that a question spans fit, and how fast they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from shardwise.plan.dry_run.job import Job
from shardwise.plan.models.source import ModelLike, resolve
from shardwise.plan.search.bounded import Task, by_setting, least_job, rounds
from shardwise.plan.search.bounds import Knowledge
from shardwise.plan.search.evaluator import STEADY, Evaluator
from shardwise.plan.search.exploration import (
    Candidate,
    Evaluate,
    Exploration,
    Objective,
    Verdict,
    explore_family,
    judge,
    nothing_fits,
    ranked,
)
from shardwise.plan.search.processes import Forecasters
from shardwise.plan.search.question import Effort, Question, asked_space, space_of
from shardwise.plan.search.space import Family, SearchSpace
from shardwise.plan.simulate.forecast import Forecast

PARALLEL_FROM = 4
"""The number of configurations from which on starting processes pays off."""
BOUNDED_FROM = 12
"""The number of configurations from which on bounds save forecasts."""
SCALED_FROM = 2
"""A family with more batches than this may have forecasts from recordings made from others."""

Progress = Callable[[int, int, Candidate], None]
"""Called with (configurations done, configurations in all, the one just judged), perhaps from several threads."""


def search(
    model: ModelLike,
    *,
    budget_bytes: int | None = None,
    objective: str = "tokens_per_s",
    global_batch: int | None = None,
    workers: int = 1,
    **arguments: Any,
) -> list[Forecast]:
    """Forecast every configuration that has to be considered, and return those that fit, best first.

    Args:
        model: as for `forecast`.
        budget_bytes: memory of one GPU, context and NCCL included. None: the device's usable bytes.
        objective: "tokens_per_s", "memory" (least first) or "micro_batch" (largest first).
        global_batch: sequences of a step over all ranks; accumulation follows from it.
        workers: processes that forecast; more than one needs a model that has a name or is a dict.
        arguments: of `forecast`. A value fixes an argument, a list gives the choices. Where `strategy`, `shard_group`,
            `micro_batch`, `activation_checkpointing` or `accumulation` is left out, it is searched.

    Returns:
        At least one forecast. The first has its timeline; the others have no events.

    Raises:
        PlanError: nothing fits, or the model cannot be planned; the message says what to change.
        ConfigError: an invalid argument.
    """
    parsed = Objective.parse(objective)
    question = Question(model, arguments, global_batch, budget_bytes, parsed, Effort.THOROUGH, workers)
    exploration = explore(question)
    if exploration.best is None:
        raise nothing_fits(exploration)
    best = Evaluator(resolve(model)).whole(exploration.best.job)
    return [best, *(candidate.forecast for candidate in exploration.fitting[1:] if candidate.forecast is not None)]


def explore(question: Question, progress: Progress | None = None) -> Exploration:
    """Search the configurations that a question spans. Raises PlanError and ConfigError as `search`."""
    with forecasters_of(question) as forecasters:
        return explore_with(question, space_of(question), forecasters, progress)


def forecasters_of(question: Question) -> Forecasters:
    """Return `Forecasters` with `question.workers` processes; with one if there are few configurations, or if the model
    is a callable, which has no name to tell another process. Raises PlanError and ConfigError as `asked_space`."""
    alone = asked_space(question).size < PARALLEL_FROM or callable(question.model)
    return Forecasters(question.model, 1 if alone else question.workers)


def explore_with(
    question: Question, whole: SearchSpace, forecasters: Forecasters, progress: Progress | None
) -> Exploration:
    """Search `whole`, the configurations that the question spans, with existing processes. If the best forecast came
    from a recording made from others and a dry run does not confirm it, search again with dry runs alone."""
    exploration = _explored(question, whole, partial(forecasters.run, scale=True), progress)
    scales = any(len(family.batches) > SCALED_FROM for family in whole.families)
    if not scales or _is_confirmed(exploration, forecasters):
        return exploration
    return _explored(question, whole, partial(forecasters.run, scale=False), progress)


def _explored(
    question: Question, whole: SearchSpace, forecast_in: Callable[..., Any], progress: Progress | None
) -> Exploration:
    done = itertools.count(1)

    def listed(task: Callable[[Evaluate], Iterator[Candidate]], evaluate: Evaluate) -> list[Candidate]:
        found = []
        for candidate in task(evaluate):
            found.append(candidate)
            if progress is not None:
                progress(next(done), whole.size, candidate)
        return found

    def run(tasks: list[Callable[[Evaluate], Iterator[Candidate]]]) -> list[list[Candidate]]:
        found: list[list[Candidate]] = forecast_in([partial(listed, task) for task in tasks])
        return found

    is_grid = question.effort is Effort.THOROUGH or whole.size < BOUNDED_FROM or question.objective is Objective.MEMORY
    found = (_grid if is_grid else _bounded)(question, whole.families, run)
    return replace(ranked(found, question.objective, question.budget_bytes), left_out=whole.left_out)


Run = Callable[[list[Callable[[Evaluate], Iterator[Candidate]]]], list[list[Candidate]]]
"""Runs tasks, each of which is called with a function that forecasts a job; returns the candidates that each finds."""


def _grid(question: Question, families: tuple[Family, ...], run: Run) -> list[Candidate]:
    """Forecast every configuration that a smaller batch does not rule out. The largest families are started first."""

    def task(family: Family, evaluate: Evaluate) -> Iterator[Candidate]:
        return explore_family(family, evaluate, question.budget_bytes, question.objective)

    order = sorted(range(len(families)), key=lambda index: -families[index].size)
    found = dict(zip(order, run([partial(task, families[index]) for index in order]), strict=True))
    return [candidate for index in range(len(families)) for candidate in found[index]]


def _bounded(question: Question, families: tuple[Family, ...], run: Run) -> list[Candidate]:
    """Forecast only configurations that may be the best."""
    found: list[Candidate] = []
    for alike in by_setting(families):
        known = Knowledge(question.budget_bytes)
        for tasks in rounds(alike):

            def start(task: Task, evaluate: Evaluate, known: Knowledge = known) -> Iterator[Candidate]:
                return task.run(evaluate, known.copy(), question.objective)

            candidates = [candidate for each in run([partial(start, task) for task in tasks]) for candidate in each]
            for candidate in candidates:
                if candidate.forecast is not None:
                    known.learn(candidate.forecast)
            found += candidates
    if any(candidate.verdict is Verdict.FITS for candidate in found):
        return found
    return _with_least(question, families, found, run)


def _with_least(question: Question, families: tuple[Family, ...], found: list[Candidate], run: Run) -> list[Candidate]:
    """If nothing fits, forecast the job of each setting that needs least memory too, because users are shown it."""

    def task(job: Job, evaluate: Evaluate) -> Iterator[Candidate]:
        yield judge(evaluate(job), question.budget_bytes)

    implied = [candidate.job for candidate in found if candidate.forecast is None]
    jobs = [job for job in map(least_job, by_setting(families)) if job in implied]
    least = [candidate for each in run([partial(task, job) for job in jobs]) for candidate in each]
    return [*least, *(candidate for candidate in found if candidate.job not in jobs)]


def _is_confirmed(exploration: Exploration, forecasters: Forecasters) -> bool:
    """Whether a dry run of the best configuration gives the same forecast as in the search."""
    best = exploration.best
    if best is None:
        return True
    short = replace(best.job, accumulation=min(best.job.accumulation, STEADY))
    alone = forecasters(short, scale=False)
    if short != best.job:  # only the memory of a short accumulation is that of a longer one
        return alone.memory == best.memory
    return alone.to_dict() == best.to_dict()

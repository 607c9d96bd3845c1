"""A question about a model, and its search: which of the configurations that it spans fit, and how fast they are."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from shardwise.errors import PlanError
from shardwise.fsdp.strategy import Strategy
from shardwise.plan.dry_run.job import Job, suited_to
from shardwise.plan.models.source import ModelLike, resolve
from shardwise.plan.search.bounds import Bounds
from shardwise.plan.search.evaluator import Evaluator
from shardwise.plan.search.exploration import (
    Candidate,
    Evaluate,
    Exploration,
    Objective,
    Outcome,
    judge,
    nothing_fits,
    ranked,
)
from shardwise.plan.search.processes import Forecasters
from shardwise.plan.search.space import SearchSpace, Sweep, search_space
from shardwise.plan.search.sweeps import Task, by_setting, explore_sweep, leanest, least_job, rounds
from shardwise.plan.simulate.forecast import Forecast
from shardwise.policy.settings import OTHER_ENGINES, OTHER_ENGINES_WORDS
from shardwise.suggest import did_you_mean

PARALLEL_FROM = 4
"""The number of configurations from which on starting processes pays off."""
BOUNDED_FROM = 12
"""The number of configurations from which on bounds save forecasts."""
COMPARED = {
    "ddp": ("fsdp2", Strategy.NO_SHARD),
    "fsdp2": ("fsdp2", Strategy.FULL_SHARD),
    "shardwise": ("shardwise", Strategy.FULL_SHARD),
}
"""(engine, strategy) by the name under which a plan can compare them."""

Progress = Callable[[int, int, Candidate], None]
"""Called with (configurations done, configurations in all, the one just judged), perhaps from several threads."""


class Effort(enum.Enum):
    """How much of a search is forecast."""

    QUICK = "quick"
    """Only the strategy that shards most, and only what bounds do not rule out."""
    USUAL = "usual"
    """What bounds do not rule out: finds the same best configuration as the whole grid."""
    THOROUGH = "thorough"
    """The whole grid, except for what follows from smaller batches."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one model."""

    model: ModelLike
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """As for `search_space`."""
    global_batch: int | None = None
    budget_bytes: int | None = None
    """Memory of one GPU, for everything. None: the device's usable bytes."""
    objective: Objective = Objective.TOKENS_PER_S
    effort: Effort = Effort.USUAL
    workers: int = 1
    """The number of processes that forecast."""
    compare: tuple[str, ...] = ()
    """Names in `COMPARED`. If there are any, the best configuration of each is found, instead of a search over
    strategies."""
    smallest_cluster: bool = False
    """Whether to find the fewest GPUs that suffice, too."""
    largest_batch: bool = False
    """Whether to find the largest micro-batch that fits, too."""


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


# The configurations ---------------------------------------------------------------------------------------------------


def space_of(question: Question) -> SearchSpace:
    """Return all configurations that a question spans, with a sequence length and attention that suit the model, whose
    code may be loaded for that. Raises PlanError and ConfigError as `asked_space`, and if the model does not support
    what was asked for."""
    asked_space(question)
    return _space(question, suited_to(resolve(question.model), question.arguments))


def asked_space(question: Question) -> SearchSpace:
    """Return as many configurations as `space_of`, without loading the model. Raises PlanError and ConfigError for
    invalid arguments."""
    space = _space(question, question.arguments)
    for sweep in space.sweeps:
        _ = sweep.base.hardware, sweep.base.node_interconnect
    return space


def _space(question: Question, arguments: Mapping[str, Any]) -> SearchSpace:
    if question.compare:
        return _side_by_side(question, arguments)
    space = search_space(arguments, question.global_batch)
    if question.effort is Effort.QUICK:
        return SearchSpace(tuple(leanest(alike) for alike in by_setting(space.sweeps)), ())
    return space


def _side_by_side(question: Question, arguments: Mapping[str, Any]) -> SearchSpace:
    """Return the configurations of everything that is compared. Raises PlanError for an unknown name, or if an engine,
    strategy or shard group is given too."""
    sweeps: list[Sweep] = []
    for name in question.compare:
        if name not in COMPARED:
            elsewhere = f"; {OTHER_ENGINES_WORDS}" if name in OTHER_ENGINES else did_you_mean(name, COMPARED)
            raise PlanError(f"cannot compare {name!r}: must be one of {', '.join(COMPARED)}{elsewhere}")
        for given in ("engine", "strategy", "shard_group"):
            if arguments.get(given) is not None:
                raise PlanError(f"{given} cannot be given with a comparison, which chooses it; leave one out")
        engine, strategy = COMPARED[name]
        space = search_space({**arguments, "engine": engine, "strategy": [strategy]}, question.global_batch)
        sweeps += space.sweeps
    return SearchSpace(tuple(sweeps), ())


# Their forecasts ------------------------------------------------------------------------------------------------------


def explore_with(
    question: Question, whole: SearchSpace, forecasters: Forecasters, progress: Progress | None
) -> Exploration:
    """Search `whole`, the configurations that the question spans, with existing processes."""
    done = itertools.count(1)

    def listed(task: Callable[[Evaluate], Iterator[Candidate]], evaluate: Evaluate) -> list[Candidate]:
        found = []
        for candidate in task(evaluate):
            found.append(candidate)
            if progress is not None:
                progress(next(done), whole.size, candidate)
        return found

    def run(tasks: list[Callable[[Evaluate], Iterator[Candidate]]]) -> list[list[Candidate]]:
        return forecasters.run([partial(listed, task) for task in tasks])

    is_grid = question.effort is Effort.THOROUGH or whole.size < BOUNDED_FROM or question.objective is Objective.MEMORY
    found = (_grid if is_grid else _bounded)(question, whole.sweeps, run)
    return replace(ranked(found, question.objective, question.budget_bytes), left_out=whole.left_out)


Run = Callable[[list[Callable[[Evaluate], Iterator[Candidate]]]], list[list[Candidate]]]
"""Runs tasks, each of which is called with a function that forecasts a job; returns the candidates that each finds."""


def _grid(question: Question, sweeps: tuple[Sweep, ...], run: Run) -> list[Candidate]:
    """Forecast every configuration that a smaller batch does not rule out. The largest sweeps are started first."""

    def task(sweep: Sweep, evaluate: Evaluate) -> Iterator[Candidate]:
        return explore_sweep(sweep, evaluate, question.budget_bytes, question.objective)

    order = sorted(range(len(sweeps)), key=lambda index: -sweeps[index].size)
    found = dict(zip(order, run([partial(task, sweeps[index]) for index in order]), strict=True))
    return [candidate for index in range(len(sweeps)) for candidate in found[index]]


def _bounded(question: Question, sweeps: tuple[Sweep, ...], run: Run) -> list[Candidate]:
    """Forecast only configurations that may be the best."""
    found: list[Candidate] = []
    for alike in by_setting(sweeps):
        bounds = Bounds(question.budget_bytes)
        for tasks in rounds(alike):

            def start(task: Task, evaluate: Evaluate, bounds: Bounds = bounds) -> Iterator[Candidate]:
                return task.run(evaluate, bounds.copy(), question.objective)

            candidates = [candidate for each in run([partial(start, task) for task in tasks]) for candidate in each]
            for candidate in candidates:
                if candidate.forecast is not None:
                    bounds.add(candidate.forecast)
            found += candidates
    if any(candidate.outcome is Outcome.FITS for candidate in found):
        return found
    return _with_least(question, sweeps, found, run)


def _with_least(question: Question, sweeps: tuple[Sweep, ...], found: list[Candidate], run: Run) -> list[Candidate]:
    """If nothing fits, forecast the job of each setting that needs least memory too, because users are shown it."""

    def task(job: Job, evaluate: Evaluate) -> Iterator[Candidate]:
        yield judge(evaluate(job), question.budget_bytes)

    implied = [candidate.job for candidate in found if candidate.forecast is None]
    jobs = [job for job in map(least_job, by_setting(sweeps)) if job in implied]
    least = [candidate for each in run([partial(task, job) for job in jobs]) for candidate in each]
    return [*least, *(candidate for candidate in found if candidate.job not in jobs)]

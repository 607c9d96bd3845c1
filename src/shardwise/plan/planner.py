"""A question about a model and its answer: which configurations fit, and how fast they are."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from shardwise.errors import ConfigError, PlanError
from shardwise.plan.dry_run.job import Job, suited_to
from shardwise.plan.models.source import ModelLike, ModelSource, resolve
from shardwise.plan.report.assumptions import assumptions, range_words
from shardwise.plan.report.report import PlanReport, amount, full_name, strategy_name
from shardwise.plan.search.bounded import Task, by_setting, leanest, least_job, rounds
from shardwise.plan.search.bounds import Knowledge
from shardwise.plan.search.evaluator import STEADY, Evaluator
from shardwise.plan.search.exploration import (
    Candidate,
    Evaluate,
    Exploration,
    Objective,
    Verdict,
    explore_family,
    gib,
    judge,
    largest_micro_batch,
    needed_bytes,
    nothing_fits,
    ranked,
    smallest_cluster,
)
from shardwise.plan.search.processes import Forecasters
from shardwise.plan.search.space import Family, SearchSpace, search_space
from shardwise.plan.simulate.forecast import Cost, Forecast
from shardwise.policy.precision import short_dtype_name
from shardwise.policy.strategy import Strategy
from shardwise.suggest import did_you_mean

PARALLEL_FROM = 4
"""Configurations from which on it pays to start processes."""
BOUNDED_FROM = 12
"""Configurations from which on bounds spare some of them."""
SCALED_FROM = 2
"""Batches of a family that are always recorded."""


COMPARED = {
    "ddp": ("fsdp2", Strategy.NO_SHARD),
    "fsdp1": ("fsdp1", Strategy.FULL_SHARD),
    "fsdp2": ("fsdp2", Strategy.FULL_SHARD),
    "deepspeed": ("deepspeed", Strategy.FULL_SHARD),
    "shardwise": ("shardwise", Strategy.FULL_SHARD),
}
"""By name, (engine, strategy) of what a plan can set side by side."""


_LADDER: tuple[Mapping[str, Any], ...] = (
    {"optimizer_in_backward": True},
    *(
        {"offload": places, **steps}
        for place in ("cpu", "nvme")
        for places, steps in (
            (f"optimizer={place}", {}),
            (f"params={place},optimizer={place}", {}),
            (f"params={place},optimizer={place}", {"optimizer_in_backward": True}),
        )
    ),
)
"""What is tried where nothing fits: each leaves less, or costs more, than the one before it."""


class Effort(enum.Enum):
    """How much of a search is forecast."""

    QUICK = "quick"
    """The strategy that shards most, and what bounds leave of it."""
    USUAL = "usual"
    """What bounds leave: the same winner as the whole grid's."""
    THOROUGH = "thorough"
    """The whole grid, but for what follows from smaller batches."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one model."""

    model: ModelLike
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """As for `space.families`."""
    global_batch: int | None = None
    budget_bytes: int | None = None
    """Of one GPU, for everything; None: the device's usable bytes."""
    objective: Objective = Objective.TOKENS_PER_S
    effort: Effort = Effort.USUAL
    workers: int = 1
    """Processes that forecast."""
    compare: tuple[str, ...] = ()
    """Of `COMPARED`: each one's best, side by side, in place of a search over strategies."""
    smallest_cluster: bool = False
    """Also ask how few GPUs would do."""
    largest_batch: bool = False
    """Also ask how large a micro-batch would fit."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer."""

    source: ModelSource
    report: PlanReport
    best: Forecast | None
    """Without its events (`best_whole`); None where nothing fits."""
    extra: Mapping[str, Any]
    """Answers beyond the best forecast, as plain data."""

    def to_dict(self) -> dict[str, Any]:
        """`Forecast.to_dict` of the best, or of the nearest to fitting; all configurations under "search"."""
        nearest = self.best or next(c.forecast for c in self.report.exploration.candidates if c.forecast is not None)
        plain = nearest.to_dict()
        plain["fits"] = self.best is not None  # within the budget, if there is one
        exploration = self.report.exploration
        if len(exploration.candidates) > 1 or exploration.left_out:
            plain["search"] = {
                "candidates": [_candidate_dict(candidate) for candidate in exploration.candidates],
                "left_out": [{**_sharding_dict(job), "why": why} for job, why in exploration.left_out],
            }
        return {**plain, **self.extra}

    def best_whole(self) -> Forecast:
        """The best one with its timeline. Raises PlanError where nothing fits."""
        self.check_fits()
        assert self.best is not None
        return Evaluator(self.source).whole(self.best.job)

    def check_fits(self) -> None:
        """Raise PlanError where nothing fits; the message names what to change."""
        if self.best is None:
            raise nothing_fits(self.report.exploration)


Progress = Callable[[int, int, Candidate], None]
"""Told (configurations done, configurations in all, the one just judged) of a search, perhaps from several threads."""


def plan(question: Question, progress: Progress | None = None) -> Plan:
    """Answer a question: the search and the further answers. Raises PlanError and ConfigError as `search`."""
    source = resolve(question.model)
    whole = _space(question)
    with _forecasters(question, whole) as forecasters:
        exploration = _explore(question, whole, forecasters, progress)
        nearest = exploration.candidates[0].job
        best = exploration.best
        shown = best or forecasters(nearest)
        answers, extra = _answers(question, forecasters, shown, best)
        if best is None:
            found = _with_more(question, forecasters, nearest)
            answers += [] if found is None else [_more_sentence(question, found)]
            extra |= {} if found is None else {"would_fit": found.to_dict()}
    report = PlanReport(
        title=f"{source.title}: {_count(shown.parameters)} parameters",
        setting=setting(replace(nearest, engine="shardwise") if question.compare else nearest),
        compares=bool(question.compare),
        exploration=exploration,
        assumptions=tuple(assumptions(shown)),
        range_words=range_words(shown.job.hardware),
        answers=tuple(answers),
    )
    return Plan(source, report, best, extra)


def _with_more(question: Question, forecasters: Forecasters, nearest: Job) -> Forecast | None:
    """Where nothing fits, the best that would if the optimizer stepped in backward, and more and more were kept
    elsewhere than on the device. None where nothing would, or the question has an answer to offload of its own."""
    if question.compare or question.arguments.get("offload") is not None or nearest.engine != "shardwise":
        return None
    lean = _leanest(question, nearest)
    for changes in _LADDER:
        try:
            job = replace(lean, **changes)
            narrowed = replace(question, arguments={**question.arguments, **changes}, effort=Effort.QUICK)
            space = _space(narrowed)
        except (ConfigError, PlanError):  # disks are for CPU ranks so far; steps in backward add up no gradients
            continue
        if job == lean or judge(forecasters(job), question.budget_bytes).verdict is not Verdict.FITS:
            continue
        found = _explore(narrowed, space, forecasters, None).best
        return found if found is not None else forecasters(job)
    return None


def _more_sentence(question: Question, found: Forecast) -> str:
    """What it would cost."""
    job = found.job
    options = [] if job.offload is None else [f"--offload {job.offload.words}"]
    if job.optimizer_in_backward and not question.arguments.get("optimizer_in_backward"):
        options.append("--optimizer-in-backward (clip = 0: no norm of all gradients)")
    waits = found.exposed_offload_s / found.step_time_s
    parts = {
        "of a GPU": needed_bytes(found),
        "of a node's host": found.host_bytes_per_node,
        "of its disk": found.disk_bytes_per_node,
    }
    takes = ", ".join(f"{gib(nbytes)} GiB {where}" for where, nbytes in parts.items() if nbytes)
    waiting = f", {waits:.0%} of the step waiting for that" if job.offload is not None else ""
    return (
        f"With {' and '.join(options)} it would fit: {full_name(job)}: {takes}; "
        f"{found.tokens_per_s_per_gpu:,.0f} tokens/s a GPU{waiting}."
    )


def _answers(
    question: Question, evaluate: Evaluate, shown: Forecast, best: Forecast | None
) -> tuple[list[str], dict[str, Any]]:
    """In sentences, and as plain data."""
    nearest = shown.job
    sentences: list[str] = []
    extra: dict[str, Any] = {}
    if question.largest_batch:
        found = largest_micro_batch(evaluate, nearest, question.budget_bytes)
        extra["largest_micro_batch"] = None if found is None else found.job.micro_batch
        sentences.append(
            f"The largest micro-batch that fits with {strategy_name(nearest)}, recompute "
            f"{nearest.activation_checkpointing}: {'none' if found is None else found.job.micro_batch}."
        )
    if question.smallest_cluster:
        job = _leanest(question, nearest)
        known = Knowledge(question.budget_bytes, [shown])
        found = smallest_cluster(
            evaluate, job, question.budget_bytes, lambda job: known.least_bytes(job) <= known.has_bytes
        )
        extra["smallest_cluster"] = None if found is None else found.job.world_size
        size = "none that is sensible" if found is None else _gpus_and_nodes(found.job)
        sentences.append(f"The smallest cluster that fits with {full_name(job)}: {size}.")
    elsewhere = {"host": shown.host_bytes_per_node, "disk": shown.disk_bytes_per_node}
    if any(elsewhere.values()):
        words = " and ".join(f"{gib(nbytes)} GiB of its {place}" for place, nbytes in elsewhere.items() if nbytes)
        sentences.append(f"Beside the devices every node needs {words}.")
    if best is not None and best.cost is not None:
        sentences.append(_cost_sentence(best.cost, best.job.world_size))
    return sentences, extra


def _cost_sentence(cost: Cost, devices: int) -> str:
    whole = f"a day of all {devices} GPUs" if devices > 1 else "a day"
    return (
        f"At {cost.per_device_hour:g} for an hour of a GPU, a step costs {amount(cost.per_step)}, a million tokens "
        f"{amount(cost.per_million_tokens)}, {whole} {amount(cost.per_day)}."
    )


def _leanest(question: Question, nearest: Job) -> Job:
    """The job with the least memory: full_shard, one sequence, all recomputed, where the question leaves these open."""
    given = question.arguments
    free = {
        "strategy": Strategy.FULL_SHARD,
        "shard_group": None,
        "micro_batch": 1,
        "accumulation": 1,
        "activation_checkpointing": "full",
    }
    open_ = {name: value for name, value in free.items() if given.get(name) is None}
    if "strategy" not in open_:
        open_.pop("shard_group", None)
    return replace(nearest, **open_)  # type: ignore[arg-type]


def setting(job: Job) -> str:
    """The settings that all jobs of a search share, in one line."""
    precision = job.precision
    dtypes = "/".join(
        short_dtype_name(name) or "as stored" for name in (precision.param, precision.reduce, precision.master)
    )
    words = [
        f"{job.world_size} x {getattr(job.gpu, 'name', job.gpu)}" + (f" on {job.nodes} nodes" if job.nodes > 1 else ""),
        f"{job.seq_len:,} tokens a sequence",
        f"{dtypes} (compute/reduce/master)",
        job.optimizer,
        f"{job.attention} attention",
    ]
    words += [f"autocast to {job.autocast}"] if job.autocast else []
    words += (
        [{"compute": "float8 products", "gathers": "float8 products and gathers"}[job.float8]] if job.float8 else []
    )
    words += ["compiled"] if job.compile else []
    words += [f"offload {job.offload.words}"] if job.offload is not None else []
    words += ["each unit's step in backward"] if job.optimizer_in_backward else []
    words += [f"as {job.engine} would run it"] if job.engine != "shardwise" else []
    return ", ".join(words)


def _candidate_dict(candidate: Candidate) -> dict[str, Any]:
    job = candidate.job
    plain: dict[str, Any] = {
        **_sharding_dict(job),
        "micro_batch": job.micro_batch,
        "accumulation": job.accumulation,
        "activation_checkpointing": job.activation_checkpointing,
        "verdict": candidate.verdict.name.lower(),
        "why": candidate.limited_by,
    }
    if candidate.forecast is not None:
        forecast = candidate.forecast
        plain |= {
            "needed_bytes": needed_bytes(forecast),
            "step_time_s": forecast.step_time_s,
            "tokens_per_s_per_gpu": forecast.tokens_per_s_per_gpu,
            "tokens_per_s_range": forecast.tokens_per_s_range,
        }
    return plain


def _sharding_dict(job: Job) -> dict[str, Any]:
    return {"strategy": job.strategy.value, "shard_group": job.shard_group}


def _gpus_and_nodes(job: Job) -> str:
    gpus = f"{job.world_size} GPU{'s' if job.world_size > 1 else ''}"
    return gpus if job.nodes == 1 else f"{gpus} on {job.nodes} nodes"


def _count(parameters: int) -> str:
    for size, name in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if parameters >= size:
            return f"{parameters / size:.2f} {name}"
    return f"{parameters:,}"


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
        budget_bytes: of one GPU, context and NCCL included; None: the device's usable bytes.
        objective: "tokens_per_s", "memory" (least first) or "micro_batch" (largest first).
        global_batch: sequences of a step over all ranks; accumulation follows from it.
        workers: processes that forecast; more than one needs a model that has a name or is a dict.
        arguments: of `forecast`. A value fixes one, a list gives the choices. Where `strategy`, `shard_group`,
            `micro_batch`, `activation_checkpointing` or `accumulation` is left out it is searched.

    Returns:
        Never empty. The first has its timeline; the others' events were not kept.

    Raises:
        PlanError: nothing fits, or the model cannot be planned; the message names the way out.
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
    whole = _space(question)
    with _forecasters(question, whole) as forecasters:
        return _explore(question, whole, forecasters, progress)


def _space(question: Question) -> SearchSpace:
    space = _side_by_side if question.compare else _quick if question.effort is Effort.QUICK else _searched
    for family in space(question, question.arguments).families:  # mistakes raise before anything is loaded or run
        _ = family.base.hardware, family.base.node_interconnect
    return space(question, suited_to(resolve(question.model), question.arguments))


def _searched(question: Question, arguments: Mapping[str, Any]) -> SearchSpace:
    return search_space(arguments, question.global_batch)


def _quick(question: Question, arguments: Mapping[str, Any]) -> SearchSpace:
    """Of each setting the strategy that shards most alone."""
    families = _searched(question, arguments).families
    return SearchSpace(tuple(leanest(alike) for alike in by_setting(families)), ())


def _side_by_side(question: Question, arguments: Mapping[str, Any]) -> SearchSpace:
    """The configurations of everything that is compared. Raises PlanError for an unknown name, or where strategy or
    engine are given besides."""
    families: list[Family] = []
    for name in question.compare:
        if name not in COMPARED:
            known = ", ".join(COMPARED)
            raise PlanError(f"cannot compare {name!r}: there are {known}{did_you_mean(name, COMPARED)}")
        for given in ("engine", "strategy", "shard_group"):
            if arguments.get(given) is not None:
                raise PlanError(f"{given} is what a comparison chooses: leave it out, or compare nothing")
        engine, strategy = COMPARED[name]
        space = search_space({**arguments, "engine": engine, "strategy": [strategy]}, question.global_batch)
        families += space.families
    return SearchSpace(tuple(families), ())


def _forecasters(question: Question, whole: SearchSpace) -> Forecasters:
    """One process where few configurations are asked for, or where the model has no name to tell another process."""
    alone = whole.size < PARALLEL_FROM or callable(question.model)
    return Forecasters(question.model, 1 if alone else question.workers)


def _explore(
    question: Question, whole: SearchSpace, forecasters: Forecasters, progress: Progress | None
) -> Exploration:
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
"""Runs tasks that are given what forecasts a job; returns what each finds."""


def _grid(question: Question, families: tuple[Family, ...], run: Run) -> list[Candidate]:
    """Every configuration that a smaller one does not rule out; the largest families are started first."""

    def task(family: Family, evaluate: Evaluate) -> Iterator[Candidate]:
        return explore_family(family, evaluate, question.budget_bytes, question.objective)

    order = sorted(range(len(families)), key=lambda index: -families[index].size)
    found = dict(zip(order, run([partial(task, families[index]) for index in order]), strict=True))
    return [candidate for index in range(len(families)) for candidate in found[index]]


def _bounded(question: Question, families: tuple[Family, ...], run: Run) -> list[Candidate]:
    """The configurations that may be the best."""
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
    """Where nothing fits, the job that needs least is forecast too: it is what people are told of."""

    def task(job: Job, evaluate: Evaluate) -> Iterator[Candidate]:
        yield judge(evaluate(job), question.budget_bytes)

    implied = [candidate.job for candidate in found if candidate.forecast is None]
    jobs = [job for job in map(least_job, by_setting(families)) if job in implied]
    least = [candidate for each in run([partial(task, job) for job in jobs]) for candidate in each]
    return [*least, *(candidate for candidate in found if candidate.job not in jobs)]


def _is_confirmed(exploration: Exploration, forecasters: Forecasters) -> bool:
    """Whether the best one, recorded by itself, gives the same forecast as in the search."""
    best = exploration.best
    if best is None:
        return True
    short = replace(best.job, accumulation=min(best.job.accumulation, STEADY))
    alone = forecasters(short, scale=False)
    if short != best.job:  # of a long accumulation only its memory is comparable with a short one's
        return alone.memory == best.memory
    return alone.to_dict() == best.to_dict()

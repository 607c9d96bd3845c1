"""Answers a question about a model: which configurations fit, and how fast they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.fsdp.strategy import Strategy
from shardwise.plan.dry_run.job import Job
from shardwise.plan.models.source import ModelSource, resolve
from shardwise.plan.report.assumptions import assumptions, range_words
from shardwise.plan.report.report import PlanReport, full_name, strategy_name
from shardwise.plan.report.sentences import (
    advice_sentences,
    candidate_dict,
    cost_sentence,
    count,
    faster_sentence,
    gpus_and_nodes,
    setting,
    sharding_dict,
)
from shardwise.plan.search.advice import advise, faster_with_axis
from shardwise.plan.search.bounds import Bounds
from shardwise.plan.search.evaluator import Evaluator
from shardwise.plan.search.exploration import (
    Evaluate,
    gib,
    largest_micro_batch,
    nothing_fits,
    smallest_cluster,
)
from shardwise.plan.search.search import Progress, Question, explore_with, forecasters_of, space_of
from shardwise.plan.simulate.forecast import Forecast


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to a question."""

    source: ModelSource
    report: PlanReport
    best: Forecast | None
    """The best forecast, without its events (those are in `best_whole`). None if nothing fits."""
    extra: Mapping[str, Any]
    """Answers beyond the best forecast, as plain data."""

    def to_dict(self) -> dict[str, Any]:
        """Return `Forecast.to_dict` of the best configuration, or of the one nearest to fitting, with all
        configurations under "search"."""
        nearest = self.best or next(c.forecast for c in self.report.exploration.candidates if c.forecast is not None)
        plain = nearest.to_dict()
        plain["fits"] = self.best is not None  # within the budget, if there is one
        exploration = self.report.exploration
        if len(exploration.candidates) > 1 or exploration.left_out:
            plain["search"] = {
                "candidates": [candidate_dict(candidate) for candidate in exploration.candidates],
                "left_out": [{**sharding_dict(job), "why": why} for job, why in exploration.left_out],
            }
        return {**plain, **self.extra}

    def best_whole(self) -> Forecast:
        """Return the best forecast with its timeline. Raises PlanError if nothing fits."""
        self.check_fits()
        assert self.best is not None
        return Evaluator(self.source).whole(self.best.job)

    def check_fits(self) -> None:
        """Raise PlanError if nothing fits; the message names what to change."""
        if self.best is None:
            advice = self.extra.get("advice")
            raise nothing_fits(self.report.exploration, f"it would fit with {advice[0]['flags']}" if advice else "")


def plan(question: Question, progress: Progress | None = None) -> Plan:
    """Answer a question: run the search and answer what else was asked. Raises PlanError and ConfigError as
    `search`."""
    source = resolve(question.model)
    with forecasters_of(question) as forecasters:
        whole = space_of(question)
        exploration = explore_with(question, whole, forecasters, progress)
        nearest = exploration.candidates[0].job
        best = exploration.best
        shown = best or forecasters(nearest)
        answers, extra = _answers(question, forecasters, shown, best)
        if (warning := source.beyond(nearest.seq_len)) is not None:
            answers.append(f"{warning}.")
            extra["warning"] = warning
        faster = None if best is None else faster_with_axis(question, exploration.fitting[0], forecasters)
        if faster is not None:
            answers.append(faster_sentence(faster))
            extra["faster"] = faster.to_dict()
        if best is None:
            advice = advise(question, nearest, forecasters)
            answers += advice_sentences(advice)
            extra["advice"] = [one.to_dict() for one in advice]
    report = PlanReport(
        title=f"{source.title}: {count(shown.parameters)} parameters",
        setting=setting(replace(nearest, engine="shardwise") if question.compare else nearest),
        compares=bool(question.compare),
        exploration=exploration,
        assumptions=tuple(assumptions(shown)),
        range_words=range_words(shown.job.hardware),
        answers=tuple(answers),
    )
    return Plan(source, report, best, extra)


def _answers(
    question: Question, evaluate: Evaluate, shown: Forecast, best: Forecast | None
) -> tuple[list[str], dict[str, Any]]:
    """Return the further answers, as sentences and as plain data."""
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
        bounds = Bounds(question.budget_bytes, [shown])
        found = smallest_cluster(evaluate, job, question.budget_bytes, bounds.may_fit)
        extra["smallest_cluster"] = None if found is None else found.job.world_size
        size = "none of a reasonable size" if found is None else gpus_and_nodes(found.job)
        sentences.append(f"The smallest cluster that fits with {full_name(job)}: {size}.")
    elsewhere = {"host": shown.host_bytes_per_node, "disk": shown.disk_bytes_per_node}
    if any(elsewhere.values()):
        words = " and ".join(f"{gib(nbytes)} GiB of its {place}" for place, nbytes in elsewhere.items() if nbytes)
        sentences.append(f"Besides its devices, every node needs {words}.")
    if best is not None and best.cost is not None:
        sentences.append(cost_sentence(best.cost, best.job.world_size))
    return sentences, extra


def _leanest(question: Question, nearest: Job) -> Job:
    """Return the job that needs the least memory: full_shard, one sequence, all blocks recomputed, where the question
    leaves these open."""
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

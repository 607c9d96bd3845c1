"""A question about a model, and the configurations that it spans."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.errors import PlanError
from shardwise.plan.dry_run.job import suited_to
from shardwise.plan.models.source import ModelLike, resolve
from shardwise.plan.search.bounded import by_setting, leanest
from shardwise.plan.search.exploration import (
    Objective,
)
from shardwise.plan.search.space import Family, SearchSpace, search_space
from shardwise.policy.strategy import Strategy
from shardwise.suggest import did_you_mean

COMPARED = {
    "ddp": ("fsdp2", Strategy.NO_SHARD),
    "fsdp1": ("fsdp1", Strategy.FULL_SHARD),
    "fsdp2": ("fsdp2", Strategy.FULL_SHARD),
    "deepspeed": ("deepspeed", Strategy.FULL_SHARD),
    "shardwise": ("shardwise", Strategy.FULL_SHARD),
}
"""By name, (engine, strategy) of what a plan can set side by side."""


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


def space_of(question: Question) -> SearchSpace:
    """All of them, for sequences and attention that the model has: its code may be loaded to learn that. Raises
    PlanError and ConfigError as `asked_space`, and where the model has not what was asked for."""
    asked_space(question)
    return _space(question, suited_to(resolve(question.model), question.arguments))


def asked_space(question: Question) -> SearchSpace:
    """As many, before anything is loaded. Raises PlanError and ConfigError for arguments that cannot be."""
    space = _space(question, question.arguments)
    for family in space.families:
        _ = family.base.hardware, family.base.node_interconnect
    return space


def _space(question: Question, arguments: Mapping[str, Any]) -> SearchSpace:
    if question.compare:
        return _side_by_side(question, arguments)
    return (_quick if question.effort is Effort.QUICK else _searched)(question, arguments)


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

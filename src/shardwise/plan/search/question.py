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
"""(engine, strategy) by the name under which a plan can compare them."""


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
    """Return, for each setting, only the configurations of the strategy that shards most."""
    families = _searched(question, arguments).families
    return SearchSpace(tuple(leanest(alike) for alike in by_setting(families)), ())


def _side_by_side(question: Question, arguments: Mapping[str, Any]) -> SearchSpace:
    """Return the configurations of everything that is compared. Raises PlanError for an unknown name, or if an engine,
    strategy or shard group is given too."""
    families: list[Family] = []
    for name in question.compare:
        if name not in COMPARED:
            known = ", ".join(COMPARED)
            raise PlanError(f"cannot compare {name!r}: must be one of {known}{did_you_mean(name, COMPARED)}")
        for given in ("engine", "strategy", "shard_group"):
            if arguments.get(given) is not None:
                raise PlanError(f"{given} cannot be given with a comparison, which chooses it; leave one out")
        engine, strategy = COMPARED[name]
        space = search_space({**arguments, "engine": engine, "strategy": [strategy]}, question.global_batch)
        families += space.families
    return SearchSpace(tuple(families), ())

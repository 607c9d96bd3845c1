"""The search by bounds finds what the whole grid finds, and asks for less."""

from typing import Any

import pytest

from shardwise.plan.dry_run.job import Job
from shardwise.plan.search.bounded import by_setting, rounds
from shardwise.plan.search.bounds import Knowledge
from shardwise.plan.search.exploration import Exploration, Objective, Verdict, explore_family, ranked
from shardwise.plan.search.space import search_space
from tests.plan.doubles import GIB, formula

CASES: list[tuple[dict[str, Any], int | None, int | None]] = [
    ({}, None, None),
    ({"gpus_per_node": 4}, None, None),
    ({"nodes": 2}, None, None),
    ({"nodes": 16}, None, None),
    ({}, None, 40 * GIB),
    ({"nodes": 4, "seq_len": 8192}, None, None),
    ({"seq_len": 512}, None, None),
    ({"seq_len": [1024, 4096]}, None, None),
    ({}, 64, None),
    ({"nodes": 2}, 1024, 60 * GIB),
    ({"gpus_per_node": 2}, None, None),
    ({"strategy": ["shard_grad_op", "hybrid_shard"], "nodes": 2}, None, None),
]
"""(arguments, global batch, budget)."""


class Asked:
    """Counts what is forecast."""

    def __init__(self, slack: float) -> None:
        self.jobs: list[Job] = []
        self._slack = slack

    def __call__(self, job: Job) -> Any:
        self.jobs.append(job)
        return formula(job, slack=self._slack)


def searched(case: int, asked: Asked, objective: Objective, quick: bool = False) -> Exploration:
    arguments, global_batch, budget = CASES[case]
    found = []
    for families in by_setting(search_space(arguments, global_batch).families):
        known = Knowledge(budget)
        for tasks in rounds(families, quick):
            answers = [c for task in tasks for c in task.run(asked, known.copy(), objective)]
            for candidate in answers:
                if candidate.forecast is not None:
                    known.learn(candidate.forecast)
            found += answers
    return ranked(found, objective, budget)


def whole_grid(case: int, asked: Asked, objective: Objective) -> Exploration:
    arguments, global_batch, budget = CASES[case]
    families = search_space(arguments, global_batch).families
    return ranked((c for f in families for c in explore_family(f, asked, budget, objective)), objective, budget)


@pytest.mark.parametrize("objective", [Objective.TOKENS_PER_S, Objective.MICRO_BATCH])
@pytest.mark.parametrize("slack", [1.0, 1.2])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_winner_is_the_grids(case: int, slack: float, objective: Objective) -> None:
    few, all_ = Asked(slack), Asked(slack)
    found, whole = searched(case, few, objective), whole_grid(case, all_, objective)
    assert len(found.candidates) == len(whole.candidates)
    assert {c.job for c in found.candidates} == {c.job for c in whole.candidates}
    assert (found.best is None) == (whole.best is None)
    if found.best is not None and whole.best is not None:
        assert objective.key(found.best) == objective.key(whole.best)
    assert len(few.jobs) == len(set(few.jobs)) < 0.7 * len(all_.jobs)
    fits = {c.job: c.verdict is Verdict.FITS for c in whole.candidates if c.forecast is not None}
    for candidate in found.candidates:
        if candidate.verdict is Verdict.IMPLIED:
            assert not fits.get(candidate.job, False), candidate


def test_a_quick_search_is_that_of_the_strategy_that_shards_most() -> None:
    found = searched(0, Asked(1.0), Objective.TOKENS_PER_S, quick=True)
    assert {c.job.strategy.value for c in found.candidates} == {"full_shard"}
    assert found.best is not None


def test_states_alone_rule_a_strategy_out() -> None:
    asked = Asked(1.0)
    found = searched(2, asked, Objective.TOKENS_PER_S)
    assert not [job for job in asked.jobs if job.strategy.value == "no_shard"]
    why = next(c.limited_by for c in found.candidates if c.job.strategy.value == "no_shard")
    assert why.startswith("needs at least ")

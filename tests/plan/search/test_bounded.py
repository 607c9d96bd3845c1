"""The search by bounds finds what the whole grid finds, and asks for less."""

from typing import Any

import pytest

from shardwise.plan.dry_run.job import Job
from shardwise.plan.search import bounds
from shardwise.plan.search.bounded import by_setting, rounds
from shardwise.plan.search.bounds import Knowledge
from shardwise.plan.search.exploration import Exploration, Objective, Verdict, explore_family, ranked
from shardwise.plan.search.space import search_space
from tests.plan.doubles import GIB, Formula, formula

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
    ({"gpus_per_node": 1, "offload": "cpu"}, None, None),
    ({"gpus_per_node": 2, "offload": "params=cpu"}, None, None),
    ({"gpus_per_node": 4, "offload": "optimizer=cpu"}, None, 60 * GIB),
    ({"gpus_per_node": 2, "offload": "cpu"}, 64, None),
    ({"gpus_per_node": 2, "offload": ["none", "optimizer=cpu", "cpu"]}, None, None),
    ({"gpus_per_node": 2, "offload": "params=cpu,gradients=cpu"}, 64, None),
]
"""(arguments, global batch, budget)."""


class Asked:
    """Counts what is forecast."""

    def __init__(self, slack: float = 1.0, step_s: float = 0.0) -> None:
        self.jobs: list[Job] = []
        self._more = {"slack": slack, "step_s": step_s}

    def __call__(self, job: Job) -> Any:
        self.jobs.append(job)
        return formula(job, **self._more)


def searched(case: int, asked: Asked, objective: Objective) -> Exploration:
    arguments, global_batch, budget = CASES[case]
    found = []
    for families in by_setting(search_space(arguments, global_batch).families):
        known = Knowledge(budget)
        for tasks in rounds(families):
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
@pytest.mark.parametrize(("slack", "step_s"), [(1.0, 0.0), (1.2, 0.0), (1.0, 0.5), (1.1, 5.0)])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_winner_is_the_grids(case: int, slack: float, step_s: float, objective: Objective) -> None:
    few, all_ = Asked(slack, step_s), Asked(slack, step_s)
    found, whole = searched(case, few, objective), whole_grid(case, all_, objective)
    assert len(found.candidates) == len(whole.candidates)
    assert {c.job for c in found.candidates} == {c.job for c in whole.candidates}
    assert (found.best is None) == (whole.best is None)
    if found.best is not None and whole.best is not None:
        assert objective.key(found.best) == objective.key(whole.best)
    assert len(few.jobs) == len(set(few.jobs)) < 0.85 * len(all_.jobs)
    fits = {c.job: c.verdict is Verdict.FITS for c in whole.candidates if c.forecast is not None}
    for candidate in found.candidates:
        if candidate.verdict is Verdict.IMPLIED:
            assert not fits.get(candidate.job, False), candidate


@pytest.mark.parametrize(("case", "most"), [(12, 9), (13, 9), (14, 11), (16, 28)])
def test_copies_rule_out_what_computation_would_not(case: int, most: int) -> None:
    """Where a step waits for copies, kinds of recomputation that need more memory are not tried at all batches; by
    computation alone it takes 14, 13, 22 and 66 forecasts."""
    asked = Asked(1.1, 0.5)
    searched(case, asked, Objective.TOKENS_PER_S)
    assert len(asked.jobs) <= most


def test_states_alone_rule_a_strategy_out() -> None:
    asked = Asked()
    found = searched(2, asked, Objective.TOKENS_PER_S)
    assert not [job for job in asked.jobs if job.strategy.value == "no_shard"]
    why = next(c.limited_by for c in found.candidates if c.job.strategy.value == "no_shard")
    assert why.startswith("needs at least ")


@pytest.mark.parametrize(("offload", "bounds_it"), [("params=cpu", True), ("params=cpu,gradients=cpu", False)])
def test_gradients_that_come_for_further_micro_batches_bound_no_step_without(offload: str, bounds_it: bool) -> None:
    several, one = (Job(gpus_per_node=2, offload=offload, accumulation=times) for times in (4, 1))  # type: ignore[arg-type]
    assert bounds._copies_no_more(several, one) == bounds_it
    assert bounds._copies_no_more(one, one)


class Stepwise(Formula):
    """Kernels that fill the device in steps: the third sequence takes longer than the mean of later ones, as forecast
    for a small Llama on 4 GPUs."""

    @property
    def compute_s(self) -> float:
        micro_batch_s = {2: 6.88e-3, 3: 10.11e-3, 18: 42.32e-3, 36: 79.58e-3}[self.job.micro_batch]
        return micro_batch_s * self.job.accumulation

    @property
    def exposed_comm_s(self) -> float:
        return 0.0


def test_a_slow_third_sequence_does_not_rule_a_large_batch_out() -> None:
    """Bounds that followed the two nearest batches gave 163,000 tokens/s for one that reaches 232,000."""
    known = [Stepwise(Job(micro_batch=n, accumulation=36 // n), {"activations": 0}) for n in (2, 3, 18, 36)]
    largest = known.pop()
    assert largest.tokens_per_s_per_gpu > max(forecast.tokens_per_s_per_gpu for forecast in known)
    for taken in (known, known[1:], known[2:]):
        knowledge = Knowledge(None, taken)  # type: ignore[arg-type]
        assert knowledge.most_tokens_per_s(largest.job) >= largest.tokens_per_s_per_gpu
        assert knowledge.most_tokens_per_s(largest.job) < 1.3 * largest.tokens_per_s_per_gpu or len(taken) == 1

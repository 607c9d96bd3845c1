"""The search by bounds finds what the whole grid finds, and asks for less."""

from math import inf
from typing import Any

import pytest

from shardwise.plan.dry_run.job import Job
from shardwise.plan.search.bounds import Bounds
from shardwise.plan.search.exploration import Exploration, Objective, Outcome, ranked
from shardwise.plan.search.space import search_space
from shardwise.plan.search.sweeps import by_setting, explore_sweep, rounds
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
    for sweeps in by_setting(search_space(arguments, global_batch).sweeps):
        bounds = Bounds(budget)
        for tasks in rounds(sweeps):
            answers = [c for task in tasks for c in task.run(asked, bounds.copy(), objective)]
            for candidate in answers:
                if candidate.forecast is not None:
                    bounds.add(candidate.forecast)
            found += answers
    return ranked(found, objective, budget)


def whole_grid(case: int, asked: Asked, objective: Objective) -> Exploration:
    arguments, global_batch, budget = CASES[case]
    sweeps = search_space(arguments, global_batch).sweeps
    return ranked((c for f in sweeps for c in explore_sweep(f, asked, budget, objective)), objective, budget)


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
    assert len(few.jobs) == len(set(few.jobs)) <= len(all_.jobs)
    fits = {c.job: c.outcome is Outcome.FITS for c in whole.candidates if c.forecast is not None}
    for candidate in found.candidates:
        if candidate.outcome is Outcome.IMPLIED:
            assert not fits.get(candidate.job, False), candidate


@pytest.mark.parametrize("case", [0, 1, 2, 3, 5, 6, 7, 9])
def test_a_search_for_speed_forecasts_less_than_half_of_the_grid(case: int) -> None:
    few, all_ = Asked(1.2), Asked(1.2)
    searched(case, few, Objective.TOKENS_PER_S)
    whole_grid(case, all_, Objective.TOKENS_PER_S)
    assert len(few.jobs) < 0.5 * len(all_.jobs)


def test_states_alone_rule_a_strategy_out() -> None:
    asked = Asked()
    found = searched(2, asked, Objective.TOKENS_PER_S)
    assert not [job for job in asked.jobs if job.strategy.value == "no_shard"]
    why = next(c.limited_by for c in found.candidates if c.job.strategy.value == "no_shard")
    assert why.startswith("needs at least ")


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
    """A bound that followed the two nearest batches gave 163,000 tokens/s for one that reaches 232,000."""
    known = [Stepwise(Job(micro_batch=n, accumulation=36 // n), {"activations": 0}) for n in (2, 3, 18, 36)]
    largest = known.pop()
    assert largest.tokens_per_s_per_gpu > max(forecast.tokens_per_s_per_gpu for forecast in known)
    for taken in (known, known[1:], known[2:]):
        bound = Bounds(None, taken).most_tokens_per_s(largest.job)  # type: ignore[arg-type]
        assert largest.tokens_per_s_per_gpu <= bound < inf

"""Search: the same answers as asking about everything, and fewer questions."""

from dataclasses import replace
from typing import Any

import pytest

from shardwise.errors import PlanError
from shardwise.plan.dry_run.job import Job
from shardwise.plan.search.exploration import (
    Candidate,
    Exploration,
    Objective,
    Outcome,
    judge,
    largest_micro_batch,
    needed_bytes,
    nothing_fits,
    ranked,
    smallest_cluster,
    ways_out,
)
from shardwise.plan.search.space import search_space
from shardwise.plan.search.sweeps import explore_sweep
from tests.plan.doubles import GIB, formula


class Asked:
    """Counts what is forecast."""

    def __init__(self, **more: Any) -> None:
        self.jobs: list[Job] = []
        self._more = more

    def __call__(self, job: Job) -> Any:
        self.jobs.append(job)
        return formula(job, **self._more)


def explored(
    asked: Asked,
    budget_bytes: int | None = None,
    objective: Objective = Objective.TOKENS_PER_S,
    global_batch: int | None = None,
    **arguments: Any,
) -> Exploration:
    found = search_space(arguments, global_batch).sweeps
    candidates = [c for sweep in found for c in explore_sweep(sweep, asked, budget_bytes, objective)]
    return ranked(candidates, objective, budget_bytes)


@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize("global_batch", [None, 64, 1024])
@pytest.mark.parametrize("slack", [1.0, 1.2])
def test_pruning_changes_no_answer(objective: Objective, global_batch: int | None, slack: float) -> None:
    asked = Asked(slack=slack)
    exploration = explored(asked, objective=objective, global_batch=global_batch)
    everything = [
        formula(sweep.job(mode, *batch), slack=slack)
        for sweep in search_space({}, global_batch).sweeps
        for mode in sweep.modes
        for batch in sweep.batches
    ]
    assert len(exploration.candidates) == len(everything)
    fitting = [forecast for forecast in everything if judge(forecast, None).outcome is Outcome.FITS]
    best = min(fitting, key=objective.key)
    assert exploration.best is not None
    assert objective.key(exploration.best) == objective.key(best)
    fits = {forecast.job: forecast.fits for forecast in everything}
    for candidate in exploration.candidates:
        if candidate.outcome is Outcome.IMPLIED:
            assert not fits[candidate.job]
        elif candidate.outcome is Outcome.FITS:
            assert fits[candidate.job]
    if objective is Objective.TOKENS_PER_S:
        assert len(asked.jobs) < 0.7 * len(everything)
    assert len(asked.jobs) == len(set(asked.jobs))


def test_a_batch_without_accumulation_is_not_implied_by_one_with() -> None:
    """Two micro-batches of 4 hold gradients besides; one of 8 does not and may fit where the two do not."""
    arguments = {"strategy": "full_shard", "activation_checkpointing": "full", "gpus_per_node": 1}
    exploration = explored(Asked(usable_bytes=122 * GIB), global_batch=8, **arguments)
    verdicts = {c.job.accumulation: c.outcome for c in exploration.candidates}
    assert verdicts[1] is Outcome.FITS
    assert verdicts[2] is verdicts[4] is Outcome.IMPLIED
    assert verdicts[8] is Outcome.TOO_LARGE


def test_what_holds_each_back_and_why_others_fall_out() -> None:
    exploration = explored(
        Asked(), strategy=["full_shard", "no_shard"], micro_batch=[1, 4, 16], activation_checkpointing=["none", "full"]
    )

    def of(strategy: str, micro_batch: int, mode: str) -> Candidate:
        jobs = (Job(strategy=strategy, micro_batch=micro_batch, activation_checkpointing=mode),)  # type: ignore[arg-type]
        return next(c for c in exploration.candidates if c.job in jobs)

    assert of("full_shard", 1, "none").limited_by == "network"
    assert of("full_shard", 4, "none").limited_by == "memory"
    assert of("full_shard", 16, "full").limited_by == "compute"
    assert of("full_shard", 1, "full").outcome is Outcome.SLOWER
    assert of("full_shard", 16, "none").limited_by == "needs 144.0 of 80.0 GiB, of which 128.0 for activations"
    assert of("no_shard", 1, "full").limited_by == "needs 115.0 of 80.0 GiB, of which 64.0 for optimizer state"
    assert of("no_shard", 16, "none").limited_by == "does not fit, because micro-batch 1 does not"
    assert exploration.candidates[0].forecast is exploration.best


def test_a_step_that_waits_for_launches_is_not_called_bound_by_compute() -> None:
    job = Job(gpus_per_node=1, micro_batch=4)
    assert judge(formula(job, usable_bytes=200 * GIB), None).limited_by == "compute"
    computes_s = formula(job).step_time_s
    assert judge(formula(job, late_s=computes_s / 10, usable_bytes=200 * GIB), None).limited_by == "compute"
    assert judge(formula(job, late_s=computes_s, usable_bytes=200 * GIB), None).limited_by == "launches"


def test_a_budget_is_what_fits() -> None:
    for budget in (30, 60):
        exploration = explored(Asked(), budget_bytes=budget * GIB)
        assert all(needed_bytes(c.forecast) <= budget * GIB for c in exploration.fitting if c.forecast)
    tight = explored(Asked(), budget_bytes=10 * GIB, strategy="no_shard", micro_batch=[2, 4])
    with pytest.raises(
        PlanError,
        match=r"nothing fits 8 x h100-sxm-80gb; the nearest configuration, no_shard with micro-batch 2, all blocks "
        r"recomputed, needs 116\.0 of 10\.0 GiB, of which 64\.0 for optimizer state; use a smaller micro-batch, "
        r"full_shard, more GPUs",
    ):
        raise nothing_fits(tight)


def test_where_one_unit_does_not_fit_it_is_named() -> None:
    """More GPUs would not help: slots have the size of the largest unit on each of them."""
    slots = formula(Job(gpus_per_node=64), context_bytes=0).memory
    has = slots["gathered_slots"] + slots["reduce_slots"]
    tight = explored(Asked(), budget_bytes=has - 1, strategy="full_shard", micro_batch=[1])
    with pytest.raises(PlanError, match=r"the trouble is one unit, the root: slots of its size take .* on any number"):
        raise nothing_fits(tight)
    with pytest.raises(PlanError, match="more GPUs or a GPU with more memory"):
        raise nothing_fits(explored(Asked(), budget_bytes=has, strategy="full_shard", micro_batch=[1]))


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("usable", [20, 31, 80, 200])
def test_the_largest_batch_is_the_last_that_fits(mode: str, usable: int) -> None:
    job = Job(activation_checkpointing=mode)

    def fits(batch: int) -> bool:
        return bool(formula(Job(activation_checkpointing=mode, micro_batch=batch), usable_bytes=usable * GIB).fits)

    found = largest_micro_batch(Asked(usable_bytes=usable * GIB), job)
    largest = max((batch for batch in range(1, 300) if fits(batch)), default=None)
    assert (found and found.job.micro_batch) == largest


@pytest.mark.parametrize("usable", [140.0, 60.0, 24.0, 16.0, 8.3])
def test_the_smallest_cluster_is_the_first_that_fits(usable: float) -> None:
    def on(size: int) -> Job:
        full = Job(activation_checkpointing="full", gpus_per_node=min(size, 8))
        return full if size <= 8 else replace(full, nodes=size // 8)

    asked = Asked(usable_bytes=int(usable * GIB))
    found = smallest_cluster(asked, on(8))
    sizes = [*range(1, 9), *range(16, 8 * 600, 8)]
    assert found is not None
    assert found.job == on(next(size for size in sizes if formula(on(size), usable_bytes=int(usable * GIB)).fits))
    assert len(asked.jobs) < 25


def test_the_smallest_cluster_is_one_that_the_tensor_axis_divides() -> None:
    asked = Asked(usable_bytes=16 * GIB)
    found = smallest_cluster(asked, Job(activation_checkpointing="full", gpus_per_node=8, tp=4))
    assert found is not None
    assert all(job.world_size % 4 == 0 for job in asked.jobs)
    assert {job.world_size for job in asked.jobs if job.world_size < found.job.world_size} >= {4}


def test_one_gpu_may_do_where_two_do_not() -> None:
    """They need a communicator, which takes more than the half of a small model that they save."""

    def small(job: Job) -> Any:
        return replace(formula(job), memory={"optimizer": GIB // 2 // job.world_size}, usable_bytes=int(1.9 * GIB))

    assert not small(Job(gpus_per_node=2)).fits
    assert not small(Job(gpus_per_node=4)).fits
    found = smallest_cluster(small, Job(gpus_per_node=4))
    assert found is not None
    assert found.job.world_size == 1


def test_ways_out_are_some() -> None:
    assert ways_out(Job(gpus_per_node=1, strategy="no_shard")) == (  # type: ignore[arg-type]
        "use activation checkpointing, more GPUs or a GPU with more memory"
    )


def test_a_group_to_reshard_to_is_no_matter_in_a_smaller_cluster() -> None:
    job = Job(activation_checkpointing="full", reshard_after_forward=4)
    found = smallest_cluster(Asked(usable_bytes=45 * GIB), job)
    assert found is not None
    assert found.job.world_size == 3


def test_no_cluster_is_large_enough_for_a_block_that_does_not_fit() -> None:
    assert smallest_cluster(Asked(usable_bytes=4 * GIB), Job()) is None


def test_an_objective_that_there_is_not() -> None:
    with pytest.raises(PlanError, match="objective='speed': must be one of tokens_per_s, memory, micro_batch"):
        Objective.parse("speed")


def test_a_candidate_names_its_job() -> None:
    candidate = judge(formula(Job()), None)
    assert isinstance(candidate, Candidate)
    assert candidate.job == Job()

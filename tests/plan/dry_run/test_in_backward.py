"""Steps in backward, run dry: gradients and traffic of the real engine, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import shardwise as sw
from shardwise.errors import ConfigError, PlanError
from shardwise.fsdp.sharded_parameter import GradientShard
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import Allocate, Free, Recording, UnitMark
from shardwise.plan.dry_run.step import record
from shardwise.plan.search.space import search_space
from tests.engine.cases import FP32, MIXED, Case
from tests.plan.rig import STATE, Regression, gpt2, job_of, state_of, traffic_of
from tests.plan.rig import real as real_step

if TYPE_CHECKING:
    from tests.ranks import RankPools


def most_bytes(recorded: Recording, kind: str) -> int:
    """Of a kind, at once."""
    held: dict[int, int] = {}
    most = 0
    for event in recorded.events:
        if isinstance(event, Allocate) and event.kind == kind:
            held[event.block] = event.nbytes
            most = max(most, sum(held.values()))
        elif isinstance(event, Free):
            held.pop(event.block, None)
    return most


def real(case: Case, precision: sw.Precision) -> tuple[dict[str, int], int, list[tuple[str, str, int]]]:
    """Memory by kind between steps, the most bytes of reduced gradients in them, and the traffic of the last step."""
    made: list[GradientShard] = []
    most = [0]
    new: Callable[[GradientShard], None] = GradientShard._renew

    def counted(shard: GradientShard) -> None:
        new(shard)
        made.append(shard)
        most[0] = max(most[0], sum(one.flat.nbytes for one in dict.fromkeys(made) if one.flat is not None))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientShard, "_renew", counted)
        state, sent = real_step(case, precision, in_backward=True)
    return state, most[0], sent


@pytest.mark.parametrize(
    ("case", "precision"),
    [(Case("full_shard", 3), FP32), (Case("hybrid_shard", 4), MIXED), (Case("shard_optimizer", 2), MIXED)],
    ids=str,
)
def test_gradients_of_one_unit_to_the_byte(ranks: RankPools, case: Case, precision: sw.Precision) -> None:
    of_ranks = ranks(case.world_size).run(real, case, precision)
    job = job_of(case, precision, optimizer_in_backward=True)
    usual = record(lambda: Regression(3), replace(job, optimizer_in_backward=False))
    for rank, (state, gradients, sent) in enumerate(of_ranks):
        recorded = record(lambda: Regression(3), job, rank)
        assert state_of(recorded) == state
        assert most_bytes(recorded, "grad_shards") == gradients < most_bytes(usual, "grad_shards")
        dry = traffic_of(recorded)
        for group in ("shard", "replicate"):
            assert [event for event in dry if event[0] == group] == [event for event in sent if event[0] == group]


def test_every_unit_steps_once_and_the_last_ones_step_is_over_with_backward() -> None:
    events = record(gpt2, Job(seq_len=16, gpus_per_node=2, optimizer_in_backward=True)).events
    marks = [event for event in events if isinstance(event, UnitMark)]
    units = {mark.unit for mark in marks}
    for what in ("step", "stepped"):
        assert sorted(mark.unit for mark in marks if mark.what == what) == sorted(units)
    order = [mark.unit for mark in marks if mark.what == "step"]
    reduced = [mark.unit for mark in marks if mark.what == "reduced"]
    assert order == reduced, "as their sums are there"


def test_what_the_engine_refuses_is_refused() -> None:
    for given, why in (
        ({"accumulation": 2}, "each backward takes a step"),
        ({"optimizer": "muon"}, "exchanges and updates whole matrices"),
        ({"engine": "fsdp2"}, "is forecast only for shardwise, not fsdp2"),
        ({"optimizer_in_backward": 1}, "True or False"),
    ):
        with pytest.raises(ConfigError, match=why):
            Job(**{"optimizer_in_backward": True, **given})  # type: ignore[arg-type]


def test_a_search_accumulates_nothing() -> None:
    [sweep] = search_space({"optimizer_in_backward": True, "strategy": "full_shard"}, 64).sweeps
    assert sweep.batches == ((8, 1),)
    with pytest.raises(PlanError, match="global batch of 1024"):
        search_space({"optimizer_in_backward": True, "strategy": "full_shard"}, 1024)


def test_state_is_the_usual_one() -> None:
    """What lies between steps, but for gradients."""
    job = Job(gpu="cpu", seq_len=16, gpus_per_node=2, optimizer="adamw-bf16")
    usual, in_backward = (state_of(record(gpt2, replace(job, optimizer_in_backward=given))) for given in (False, True))
    assert in_backward == {kind: 0 if kind == "grad_shards" else usual[kind] for kind in STATE}

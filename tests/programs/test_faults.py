"""Random programs notice mistakes: of each planted one, a small program that shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.programs.drawing import program_of
from tests.programs.faults import FAULTS, SeamGone, at, faulty
from tests.programs.fleet import Fleet
from tests.programs.program import Node, Program, Sharding, Train
from tests.programs.running import Outcome

if TYPE_CHECKING:
    from tests.ranks import RankPools

ONE_STEP = (Train(),)
HYBRID = Program(seed=444, world_size=4, sharding=Sharding("hybrid_shard"), actions=ONE_STEP)
IDLE_EXPERTS = Program(seed=718, model=Node("chain", (Node("experts", option="rank-raw"),)), actions=ONE_STEP)
ONE_UNIT = Program(
    seed=449,
    model=Node("chain", (Node("dense", unit=True),)),
    sharding=Sharding(units="marked"),
    actions=ONE_STEP,
)
FOUND_BY = {
    "dropped_reduction": Program(seed=449, actions=(Train(synced=(True, True)),)),
    "slot_claimed_early": Program(seed=716, actions=(Train("two_forwards"),)),
    "stale_gather": Program(seed=176, sharding=Sharding("shard_optimizer"), actions=(Train(), Train())),
    "used_flag_lost": IDLE_EXPERTS,
    "overwritten_gradient": Program(seed=444, actions=(Train("interleaved", synced=(False, True)),)),
    "wrong_world_size": HYBRID,
    "late_gradient_dropped": program_of(51),
    "skipped_call_not_passed": program_of(5, uneven=True),
    "released_too_early": ONE_UNIT,
    "wrong_offset": HYBRID,
    "no_sync_forgotten": Program(seed=449, world_size=1, actions=(Train(synced=(False, True)),)),
    "replicas_skipped": HYBRID,
    "old_gradients_left": IDLE_EXPERTS,
    "local_norm": Program(seed=954, actions=(Train(clip="sw"),)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(ranks: RankPools, fault: str) -> None:
    with Fleet(ranks) as fleet:
        assert fleet.run(FOUND_BY[fault]).outcome is Outcome.OK
        found = fleet.run(FOUND_BY[fault], faulty, fault).outcome
    assert found in {Outcome.MISMATCH, Outcome.REFUSAL, Outcome.CRASH}


def test_a_seam_that_is_gone_is_named() -> None:
    with pytest.raises(SeamGone, match=r"no fsdp\.unit:Unit\.nothing any more"):
        at("fsdp.unit:Unit.nothing", lambda original: original)

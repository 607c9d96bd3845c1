"""A step is all or nothing: where one rank abandons a part of it, every rank raises before any optimizer mixes batches,
and the message names that rank and its exception. Where all ranks abandon the same step, training goes on."""

from __future__ import annotations

import re
import time

import pytest
import torch.distributed as dist

import shardwise as sw
from tests.comm.nccl_double import doubled
from tests.engine.abandoned import LATE, SEEN, STRATEGIES, TRANSPORTS, UNSEEN, said, train
from tests.engine.rig import Net, on_ranks, seeded

SKIPS = "a batch that one rank skips, all must skip"
SAID = {
    **dict.fromkeys(SEEN, "BadRow: row 7"),
    **dict.fromkeys(UNSEEN, f"as when the loss raises|{SKIPS}"),
    "interrupt": "rank 1 raised an error|all must skip",
    **dict.fromkeys(LATE, rf"rank \d took an optimizer step|{SKIPS}"),
}


def check(place: str, ended: int, error: str) -> None:
    assert error, "a rank went on to the end"
    assert ended == (2 if place in LATE and dist.get_rank() != 1 else 1)
    assert re.search(SAID[place], error), error
    assert "rank 1" in error


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("place", SAID)
@on_ranks(2, timeout_s=30)
def test_where_one_rank_abandons_its_step_every_rank_raises(place: str, strategy: str, transport: str) -> None:
    begun = time.monotonic()
    check(place, *said(place, strategy, transport))
    assert time.monotonic() - begun < 20  # not the group's timeout


@pytest.mark.parametrize("place", SAID)
@on_ranks(2, timeout_s=30)
def test_over_streams_hosts_tell_each_other(place: str) -> None:
    """With one strategy: where ranks' collectives differ, the double waits on the host, as no device would."""
    with doubled():
        ended, error = train(sw.shard(seeded(Net), "no_shard"), place, by_rank=1)
    check(place, ended, str(error or ""))


@pytest.mark.parametrize("place", ["unit", "backward", "loss", "before the step"])
@on_ranks(4, timeout_s=30)
def test_replicas_of_shards_raise_too(place: str) -> None:
    check(place, *said(place, "hybrid_shard", "shm"))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("place", SAID)
@on_ranks(2, timeout_s=30)
def test_what_all_ranks_abandon_leaves_training_as_it_was(place: str, strategy: str, transport: str) -> None:
    assert said(place, strategy, transport, by_rank=None) == (3, "")

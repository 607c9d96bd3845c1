"""The channel through the group's store."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist

from shardwise.comm.store_channel import StoreChannel
from shardwise.errors import CollectiveTimeout, MismatchError
from tests.engine.rig import on_ranks

LABELS = {1: "the end of a forward", 2: "the end of a backward"}


def channel() -> StoreChannel:
    group = dist.group.WORLD
    assert group is not None
    return StoreChannel(group, LABELS)


def joined(left: bytes, right: bytes) -> bytes:
    return left + right


@on_ranks(2, 3)
def test_every_rank_gets_all_messages_in_rank_order() -> None:
    one, other = channel(), channel()
    ranks = range(dist.get_world_size())
    for round_ in range(3):
        if dist.get_rank() == round_ % 2:
            time.sleep(0.01)
        for of, words in ((one, b"\0%d\xff"), (other, b"-%d")):
            assert of.exchange(words % dist.get_rank(), joined, 1) == b"".join(words % rank for rank in ranks)


@on_ranks(2)
def test_messages_that_all_have_read_are_deleted() -> None:
    of = channel()
    for _ in range(20):
        of.exchange(b"", joined)
    dist.barrier()  # each rank deletes its own
    assert not of._store.check(["19/0"])
    assert of._store.check(["20/0"])


@on_ranks(3)
def test_ranks_at_different_things_hear_of_both_and_may_go_on() -> None:
    of = channel()
    with pytest.raises(MismatchError, match=r"the end of a (forward|backward).*the end of a (forward|backward)"):
        of.exchange(b"", joined, 2 if dist.get_rank() == 2 else 1)
    assert of.exchange(b"a", joined, 1) == b"aaa"


@pytest.mark.parametrize(
    ("reason", "kind", "said"),
    [
        (
            "ValueError: no",
            CollectiveTimeout,
            'rank 1 raised "ValueError: no" instead of taking part in the end of a f',
        ),
        ("", CollectiveTimeout, "rank 1 raised an error instead"),
        ("MismatchError: ranks differ", MismatchError, "^ranks differ"),
    ],
)
@on_ranks(2)
def test_a_rank_that_abandons_an_exchange_ends_the_others_at_once(reason: str, kind: type, said: str) -> None:
    of = channel()
    if dist.get_rank() == 1:
        of.abandon(reason)
    else:
        with pytest.raises(kind, match=said):
            of.exchange(b"", joined, 1)
    assert of.exchange(b"b", joined, 1) == b"bb"


@on_ranks(2)
def test_what_all_abandon_hurts_no_later_exchange() -> None:
    of = channel()
    of.abandon("a bad row")
    assert of.exchange(b"c", joined) == b"cc"


@on_ranks(2)
def test_a_rank_that_does_not_come_is_named() -> None:
    os.environ["SHARDWISE_TIMEOUT_S"] = "0.5"
    try:
        of = channel()
    finally:
        del os.environ["SHARDWISE_TIMEOUT_S"]
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveTimeout, match=r"forward on rank 0: rank 1 did not take part within 0\.5 s"):
            of.exchange(b"", joined, 1)
    dist.barrier()

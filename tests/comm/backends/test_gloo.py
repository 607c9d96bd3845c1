"""Tests of gloo alone, which sends messages: ranks that call different collectives, and peers that die."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from shardwise.comm.backends.gloo import GlooCollectives
from shardwise.errors import CollectiveTimeout, MismatchError
from shardwise.fsdp.collectives import Buffer, BufferKind, FlatSpan
from tests.ranks import RankPool, RankPools


def group_of_all(timeout_s: float) -> GlooCollectives:
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))
    assert group is not None
    return GlooCollectives(group)


def other_order(what: str) -> str:
    comm = group_of_all(30)
    comm.labels.update({1: "the gather of one", 2: "the gather of two"})
    one, two = (comm.allocate(40 * comm.world_size, BufferKind.GATHER) for _ in range(2))
    gathered: list[Buffer] = [one, two] if comm.rank == 0 else [two, one]
    try:
        if what == "buffers":
            for buffer in gathered:
                comm.all_gather(buffer, (FlatSpan(0, 40),), label=buffer.index + 1).wait()
        elif what == "ops":
            comm.all_reduce(torch.zeros(40), "sum" if comm.rank else "max").wait()
        else:
            comm.all_reduce(torch.zeros(40 + comm.rank)).wait()
    except MismatchError as error:
        return str(error)
    return "nothing was noticed"


def one_dies() -> None:
    comm = group_of_all(20)
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        comm.all_reduce(torch.zeros(100_000)).wait()
    finally:
        assert time.monotonic() - start < 10


def after_a_failure() -> list[float]:
    group = dist.new_group(timeout=datetime.timedelta(seconds=10))
    assert group is not None
    failing = GlooCollectives(group)
    with contextlib.suppress(MismatchError):
        failing.all_reduce(torch.ones(20_000), "sum" if failing.rank else "max").wait()
    del failing
    comm = GlooCollectives(group)
    numbers = torch.full((20_000,), comm.rank + 1.0)
    comm.all_reduce(numbers).wait()
    return numbers.unique().tolist()


def test_messages_of_a_collective_that_failed_are_not_taken_for_later_ones(ranks: RankPools) -> None:
    """gloo pairs a message that was posted and forgotten with the next receive of its tag, which then gets nothing."""
    assert ranks(2).run(after_a_failure) == [[3.0], [3.0]]


def ahead_of_a_failure() -> float:
    """Let rank 1 wait for its second collective first, while rank 0 raises in its first."""
    comm = group_of_all(30)
    start = time.monotonic()
    if comm.rank == 0:
        with pytest.raises(MismatchError):
            comm.all_reduce(torch.ones(20_000), "max").wait()
    else:
        buffer = comm.allocate(40 * comm.world_size, BufferKind.GATHER)
        _, second = (comm.all_gather(buffer, (FlatSpan(0, 40),)) for _ in range(2))
        with pytest.raises(MismatchError, match="rank 0 is at all_reduce, rank 1 at all_gather"):  # rank 0's words
            second.wait()
    comm.abandon()  # nobody needs to be told again
    return time.monotonic() - start


def test_a_rank_that_is_ahead_of_one_that_fails_does_not_wait_for_its_timeout(ranks: RankPools) -> None:
    assert max(ranks(2).run(ahead_of_a_failure)) < 10


@pytest.mark.parametrize("what", ["buffers", "ops", "sizes"])
def test_disagreement_is_an_error_that_names_both_sides_at_once(ranks: RankPools, what: str) -> None:
    start = time.monotonic()
    messages = ranks(2).run(other_order, what)
    assert time.monotonic() - start < 20
    for rank, message in enumerate(messages):
        assert f"rank {rank}" in message
        assert f"rank {1 - rank}" in message
        named = ["the gather of one", "the gather of two"] if what == "buffers" else ["all_reduce", "sizes or dtypes"]
        assert all(words in message for words in named), message


def test_a_dead_peer_is_noticed() -> None:
    with RankPool(3) as pool, pytest.raises(CollectiveTimeout, match="no message from rank"):
        pool.run(one_dies)

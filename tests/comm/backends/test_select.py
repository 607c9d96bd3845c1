"""The choice of the collectives' implementation for a group, which its ranks must agree on."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwise.comm.backends import select
from shardwise.comm.backends.shared_memory import segment
from shardwise.errors import ConfigError
from shardwise.fsdp.torch_collectives import collectives_for
from tests.ranks import RankPools


def chosen(asked: str = "", broken_rank: int | None = None) -> str:
    os.environ["SHARDWISE_COLLECTIVES"] = asked
    works = segment._map

    def fails(*_: object, **__: object) -> torch.Tensor:
        raise OSError(13, "no")

    if dist.get_rank() == broken_rank:
        segment._map = fails
    try:
        comm = collectives_for(None, "cpu")
        comm.barrier()
        return comm.name
    except ConfigError as error:
        return str(error)
    finally:
        segment._map = works
        del os.environ["SHARDWISE_COLLECTIVES"]


def on_a_device(separate: str) -> tuple[bool, object]:
    """Return what streams are made with, on an accelerator that is not there."""
    os.environ["SHARDWISE_SEPARATE_REDUCTIONS"] = separate
    try:
        with mock.patch.object(select, "ChannelStreams") as made:
            collectives_for(None, "xpu:0")
    finally:
        del os.environ["SHARDWISE_SEPARATE_REDUCTIONS"]
    (_, device, is_separate), options = made.call_args
    assert device == torch.device("xpu:0")
    return is_separate, options["channel"].__name__


def of_one() -> list[tuple[str, int, int]]:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    comm = collectives_for(groups[dist.get_rank()], "cpu")
    return [(comm.name, comm.rank, comm.world_size)]


def of_fakes() -> tuple[str, int, int]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    comm = collectives_for(None, "cpu")
    return comm.name, comm.rank, comm.world_size


def test_one_host_shares_memory(ranks: RankPools) -> None:
    assert ranks(2).run(chosen) == ["shm", "shm"]


def test_one_rank_that_cannot_share_decides_for_all(ranks: RankPools) -> None:
    for broken in (0, 1):
        assert ranks(2).run(chosen, "", broken) == ["gloo", "gloo"]
    for message in ranks(2).run(chosen, "shm", 1):
        assert "does not work here" in message
        assert "rank 1 cannot share" in message


@pytest.mark.parametrize("asked", ["gloo", "shm", "dry"])
def test_environment_overrides(ranks: RankPools, asked: str) -> None:
    assert ranks(2).run(chosen, asked) == [asked, asked]


def test_devices_get_streams_and_a_tree_for_messages_between_their_hosts(ranks: RankPools) -> None:
    assert ranks(2).run(on_a_device, "0") == [(False, "channel_of")] * 2
    assert ranks(2).run(on_a_device, "1") == [(True, "channel_of")] * 2


def test_bad_choices(ranks: RankPools) -> None:
    assert "choose one of streams, gloo, shm, dry" in ranks(2).run(chosen, "mpi")[0]
    assert "cannot be used for ranks on cpu" in ranks(2).run(chosen, "streams")[0]


def test_alone(ranks: RankPools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDWISE_COLLECTIVES", raising=False)
    comm = collectives_for(None, "cpu")
    assert (comm.name, comm.rank, comm.world_size) == ("dry", 0, 1)
    assert ranks(2).run(of_one) == [[("dry", 0, 1)]] * 2


def test_fake_groups_are_dry(ranks: RankPools) -> None:
    assert ranks(2).run(of_fakes) == [("dry", 5, 8)] * 2


def test_collectives_of_accelerators_import_without_one() -> None:
    from shardwise.fsdp.torch_collectives import StreamCollectives

    assert StreamCollectives.name == "streams"


@pytest.mark.parametrize(("asked", "expected"), [("", False), ("0", False), ("1", True)])
def test_a_second_communicator_is_opt_in(monkeypatch: pytest.MonkeyPatch, asked: str, expected: bool) -> None:
    if asked:
        monkeypatch.setenv("SHARDWISE_SEPARATE_REDUCTIONS", asked)
    assert select._separate_reductions() is expected


def test_a_second_communicator_takes_no_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_SEPARATE_REDUCTIONS", "yes")
    with pytest.raises(ConfigError, match="SHARDWISE_SEPARATE_REDUCTIONS='yes'"):
        select._separate_reductions()

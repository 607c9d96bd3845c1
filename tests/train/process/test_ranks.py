import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch

from shardwise import device_tools
from shardwise.errors import MeshError, PeerError
from shardwise.train.process.interruption import Interrupted
from shardwise.train.process.ranks import Ranks, started
from tests.ranks import RankPools


def exchange() -> None:
    rank = torch.distributed.get_rank()
    with started() as ranks:
        assert (ranks.rank, ranks.world_size, ranks.device.type) == (rank, 3, "cpu")
        assert ranks.sum([rank + 0.5, 1.0]) == [3 * 0.5 + 3, 3.0]
        assert ranks.count(2**53 + rank) == 3 * 2**53 + 3  # float64 would lose the last bit
        assert ranks.all_gather_object([rank, -rank]) == [[0, 0], [1, -1], [2, -2]]
        assert ranks.all_gather_object(f"I am {rank}") == ["I am 0", "I am 1", "I am 2"]
        assert ranks.on_first(lambda: rank == 0) is True
        with ranks.together():
            pass
        with pytest.raises(ValueError if rank == 1 else PeerError, match=r"^(rank 1 failed: )?no cheese$"):
            fail(ranks)
        assert ranks.count(1) == 3  # nobody was left in a collective
    assert torch.distributed.is_initialized(), "a process group that was there before is left alone"


def fail(ranks: Ranks) -> None:
    with ranks.together():
        if ranks.rank == 1:
            raise ValueError("no cheese")


def test_three_ranks_agree(ranks: RankPools) -> None:
    ranks(3).run(exchange)


def meet(identities: list[str | None], hosts: list[str]) -> None:
    """Start ranks that see one device each, all under the same name."""
    rank = torch.distributed.get_rank()
    device = torch.device("xpu", 0)
    with (
        mock.patch.object(device_tools, "of_local_rank", return_value=device),
        mock.patch.object(device_tools, "identity", return_value=identities[rank]),
        mock.patch("socket.gethostname", return_value=hosts[rank]),
        started() as ranks,
    ):
        assert ranks.device == device


def refused(identities: list[str | None], hosts: list[str]) -> None:
    with pytest.raises(MeshError, match=r"^ranks 0 and 2 have the same device, GPU-a of one: let each rank of a host"):
        meet(identities, hosts)


def test_ranks_that_share_a_device_are_told(ranks: RankPools) -> None:
    ranks(3).run(refused, ["GPU-a", "GPU-b", "GPU-a"], ["one"] * 3)
    ranks(3).run(meet, ["GPU-a", "GPU-b", "GPU-c"], ["one"] * 3)
    ranks(3).run(meet, ["GPU-a", "GPU-b", "GPU-a"], ["one", "one", "two"])
    ranks(3).run(meet, [None] * 3, ["one"] * 3)


def test_alone_there_is_no_process_group() -> None:
    with started() as ranks:
        assert not torch.distributed.is_initialized()
        assert ranks == Ranks(0, 1, torch.device("cpu"))
        assert ranks.sum([1.5]) == [1.5]
        assert ranks.count(3) == 3
        assert ranks.all_gather_object([1.0]) == [[1.0]]
        assert ranks.all_gather_object("I") == ["I"]
        assert ranks.on_first(lambda: True)


@pytest.fixture
def _launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the environment that torchrun gives the only rank of a run."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def leave_with(error: BaseException | None) -> bool:
    """Leave the block with an error or without. Returns whether the process group still exists."""
    with suppress(ValueError, KeyboardInterrupt), started():
        assert torch.distributed.is_initialized()
        if error is not None:
            raise error
    return torch.distributed.is_initialized()


@pytest.mark.usefixtures("_launched")
@pytest.mark.parametrize("together", [None, Interrupted()], ids=str)
def test_ranks_that_end_together_part(together: BaseException | None) -> None:
    assert not leave_with(together)


@pytest.mark.usefixtures("_launched")
@pytest.mark.parametrize("alone", [ValueError(), KeyboardInterrupt()], ids=repr)
def test_one_that_ends_alone_does_not_wait_for_the_others(alone: BaseException) -> None:
    assert leave_with(alone)


NO_THREADS_LEFT = """
import os
import torch
import shardwise as sw
from shardwise.train.process.interruption import Interrupted
from shardwise.train.process.ranks import started

def of_gloo():
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    return [name for name in names if "gloo" in name]

def train():
    model = sw.shard(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    model(torch.ones(1, 4)).sum().backward()

with started():
    train()
    assert of_gloo()
assert not of_gloo(), of_gloo()
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are looked up in /proc")
def test_no_thread_of_gloo_outlives_the_run() -> None:
    """A thread that holds a tensor when the interpreter exits sometimes aborts the process."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-c", NO_THREADS_LEFT]
    both = [subprocess.Popen(command, env={**os.environ, **place, "RANK": rank}) for rank in "01"]
    try:
        assert [process.wait(120) for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize(("per_host", "crosses"), [("4", False), ("2", False), ("1", True)])
def test_ranks_that_share_a_batch(per_host: str, crosses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", per_host)
    every = [Ranks(rank, 4, torch.device("cpu"), per_batch=2, per_slice=2) for rank in range(4)]
    assert [(ranks.data_rank, ranks.data_ranks, ranks.counts) for ranks in every] == [
        (0, 2, 1),
        (0, 2, 0),
        (1, 2, 1),
        (1, 2, 0),
    ]
    assert {ranks.crosses_hosts for ranks in every} == {crosses}

"""The harness in `ranks.py`: results, failures, hangs, and what functions leave behind on ranks."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import device
from tests.ranks import RankPool, RankPools, RanksHung


def describe(word: str) -> tuple[str, int, int, str | None]:
    return word, dist.get_rank(), dist.get_world_size(), os.environ.get("EXTRA")


def total() -> float:
    one = torch.ones(1)
    dist.all_reduce(one)
    return one.item()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("a mistake")
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1000)


def leave_groups() -> int:
    before = len(dist.distributed_c10d._world.pg_map)
    dist.new_group([0, 1])
    return before


def patch(patches: pytest.MonkeyPatch) -> bool:
    before = hasattr(dist, "patched")
    patches.setattr(dist, "patched", True, raising=False)
    return before


def destroy() -> None:
    dist.destroy_process_group()


def replace_default_group() -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_results_by_rank(ranks: RankPools) -> None:
    assert ranks(2).run(describe, "x") == [("x", 0, 2, None), ("x", 1, 2, None)]
    assert ranks(2).pids() == ranks(2).pids()


def test_environment(ranks: RankPools) -> None:
    assert ranks(2, EXTRA="yes").run(describe, "x")[1] == ("x", 1, 2, "yes")
    assert ranks(2).run(describe, "x")[1][3] is None


def test_ranks_stand_where_the_test_does(ranks: RankPools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also ranks that began for a test elsewhere."""
    ranks(2).run(Path.cwd)
    monkeypatch.chdir(tmp_path)
    assert ranks(2).run(Path.cwd) == [tmp_path] * 2


def test_failure_is_raised_and_survived(ranks: RankPools) -> None:
    with pytest.raises(KeyError, match="a mistake") as caught:
        ranks(2).run(fail_on, 1)
    assert any("fail_on" in note for note in caught.value.__notes__)
    assert ranks(2).run(total) == [2.0, 2.0]


def test_failure_on_all_keeps_processes(ranks: RankPools) -> None:
    pids = ranks(2).pids()
    with pytest.raises(ZeroDivisionError):
        ranks(2).run(divmod, 1, 0)
    assert ranks(2).run(total) == [2.0, 2.0]
    assert ranks(2).pids() == pids


def test_hang_shows_the_stack_and_is_survived() -> None:
    with RankPool(2) as pool:
        with pytest.raises(RanksHung, match=r"ranks \[1\] of 2(.|\n)*hang_on"):
            pool.run(hang_on, 1, timeout_s=3)
        assert pool.run(total) == [2.0, 2.0]


def test_groups_do_not_pile_up(ranks: RankPools) -> None:
    assert [ranks(2).run(leave_groups) for _ in range(3)] == [[1, 1]] * 3


def test_destroyed_default_group_is_replaced(ranks: RankPools) -> None:
    for function in (destroy, replace_default_group):
        ranks(2).run(function)
        assert ranks(2).run(total) == [2.0, 2.0]


def test_what_a_function_patches_is_undone(ranks: RankPools, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [ranks(2).run(patch, monkeypatch) for _ in range(2)] == [[False, False]] * 2


def made_here() -> tuple[str, bool]:
    return str(torch.get_default_device()), torch.utils._device.CURRENT_DEVICE is not None


def test_ranks_make_tensors_on_the_device_that_tests_are_run_on(ranks: RankPools) -> None:
    assert ranks(2, SHARDWISE_TEST_DEVICE="cpu").run(made_here) == [("cpu", True)] * 2


@pytest.mark.parametrize(
    ("sees", "count", "reason"),
    [
        (None, 0, "SHARDWISE_TEST_DEVICE=cuda, but torch sees no accelerator"),
        (torch.device("xpu"), 8, "SHARDWISE_TEST_DEVICE=cuda, but torch sees xpu"),
        (torch.device("cuda"), 1, "2 ranks need a device each: torch sees 1"),
        (torch.device("cuda"), 2, None),
    ],
)
def test_tests_for_more_ranks_than_devices_skip(
    sees: torch.device | None, count: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(device.VARIABLE, "cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: sees)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    assert device.backend() == "cpu:gloo,cuda:nccl"
    with nullcontext() if reason is None else pytest.raises(pytest.skip.Exception, match=reason):
        device.skip_without(2)
    with pytest.raises(pytest.skip.Exception, match="a simulation runs on CPU ranks"):
        device.skip_beside_one("a simulation")

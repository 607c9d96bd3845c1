"""What is said of machines and links, from facts that are given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.diagnosis.environment import Facts, clock_findings, disk_findings, machine_findings
from shardwise.diagnosis.links import rounds, slow_links, slow_ranks
from tests.diagnosis.faults import with_wrong_sums

RIGHT = Facts("a", {"torch": "2.13"}, "H100", 2**36, {"eth0": "100000 Mb/s"}, (), 2**33, 65536, False, {})


@pytest.mark.parametrize(
    ("check", "change", "about", "words"),
    [
        ("versions", {"versions": {"torch": "2.12"}}, "torch", "2.13 on rank 0, 2.12 on rank 1"),
        ("devices", {"device": "A100"}, "rank 1", "has A100"),
        ("devices", {"device_bytes": 2**35}, "rank 1", "of 32.0 GiB"),
        ("links", {"host": "b", "interfaces": {}}, "b", "no network interface is up"),
        ("links", {"ports_down": ("mlx5_0/ports/1",)}, "a mlx5_0/ports/1", "is not active"),
        ("shared memory", {"shm_bytes": 2**26}, "a", "/dev/shm has 64.0 MiB free"),
        ("limits", {"open_files": 256}, "a", "ulimit -n is 256"),
        ("limits", {"locked_is_limited": True}, "a", "ulimit -l is limited"),
        ("NCCL settings", {"settings": {"NCCL_ALGO": "Ring"}}, "NCCL_ALGO", "unset on rank 0, Ring on rank 1"),
    ],
)
def test_a_fact_that_is_wrong_is_named(check: str, change: dict[str, Any], about: str, words: str) -> None:
    assert machine_findings([RIGHT, RIGHT]) == []
    [(name, found)] = machine_findings([RIGHT, replace(RIGHT, **change)])
    assert (name, found.fqn) == (check, about)
    assert words in found.words


def test_a_setting_that_slows_devices_is_named_on_devices_alone() -> None:
    slow = replace(RIGHT, settings={"NCCL_P2P_DISABLE": "1"})
    [(_, found)] = machine_findings([slow])
    assert "through host memory" in found.words
    assert machine_findings([replace(slow, device="cpu")]) == []
    assert machine_findings([replace(slow, settings={"NCCL_P2P_DISABLE": "0"})]) == []


def test_clocks_and_disks() -> None:
    assert [one.fqn for one in clock_findings([0.0, 0.2, -7.0])] == ["rank 2"]
    assert list(disk_findings("/x", 2**40, 1e9)) == []
    assert "make room" in next(disk_findings("/x", 2**20, 1e9)).words
    assert "4.0 MiB/s" in next(disk_findings("/x", 2**40, 2**22)).words


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_every_pair_is_measured_once_and_no_rank_twice_at_a_time(count: int) -> None:
    found = rounds(range(count))
    assert sorted(pair for pairs in found for pair in pairs) == [
        (a, b) for a in range(count) for b in range(a + 1, count)
    ]
    assert all(len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in found)


def test_a_slow_link_and_a_slow_rank_are_named() -> None:
    rates = {pair: 10.0 for pairs in rounds(range(4)) for pair in pairs}
    assert list(slow_links(rates)) == []
    assert [one.fqn for one in slow_links({**rates, (1, 3): 2.0})] == ["ranks 1 and 3"]
    slow = {pair: 2.0 if 2 in pair else rate for pair, rate in rates.items()}
    assert [one.fqn for one in slow_links(slow)] == ["rank 2"]
    assert [one.fqn for one in slow_ranks([10.0, 9.0, 2.5])] == ["rank 2"]
    assert [one.fqn for one in slow_ranks([10.0, 2.5])] == ["rank 1"]
    bridged = {(0, 1): 100.0, (2, 3): 100.0, (0, 2): 25.0, (0, 3): 25.0, (1, 2): 25.0, (1, 3): 25.0}
    assert list(slow_links(bridged)) == []


def test_a_wrong_answer_of_a_collective_is_named(ranks: Any) -> None:
    for names in ranks(2).run(with_wrong_sums):
        assert names == [["reduce-scatter", "reduce-scatter"]]

"""DeepSpeed as a peer of the offload benchmark, wherever it is installed or not."""

import argparse
import importlib.util
from typing import Any

import pytest

from benchmarks.common import launch
from benchmarks.common.launch import JobFailed
from benchmarks.less_memory import deepspeed_offload, offload

MIB = 2**20
BUILD = """RuntimeError: Error building extension 'async_io': [1/2] c++ -c a.cpp
a.cpp:1: fatal error: libaio.h
ninja: build stopped: subcommand failed."""


def _rank(**more: Any) -> dict[str, Any]:
    figures = {
        "step_s": 1.0,
        "optimizer_s": 0.5,
        "cpu_s": 2.0,
        "peak_bytes": 8 * MIB,
        "moved_bytes": 0,
        "parameters": 1,
    }
    return {**figures, "ring_bytes": MIB, "file_bytes": 8 * MIB, "bytes_per_s": 1.0, "losses": [2.0, 1.0], **more}


def _args() -> argparse.Namespace:
    return argparse.Namespace(
        rounds=2, steps=2, layers=1, width=64, vocab=8, ring_mib=80, path="unused", deepspeed=True
    )


def test_without_deepspeed_the_reason_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reason = deepspeed_offload.unavailable()
    assert reason == "deepspeed is skipped: it is not installed (pip install 'shardwise[bench]')"


def test_operators_that_cannot_be_built_are_told_by_the_compilers_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise JobFailed("ninja: stopped", BUILD)

    monkeypatch.setattr(deepspeed_offload, "missing", lambda engine: None)
    monkeypatch.setattr(launch, "run", fail)
    reason = deepspeed_offload.unavailable()
    assert reason is not None
    assert reason.endswith(
        "cannot be built here (RuntimeError: Error building extension 'async_io': a.cpp:1: fatal error: libaio.h)"
    )


def test_a_ranks_error_is_told_and_not_the_launchers_account_of_it() -> None:
    output = "[rank1]: AssertionError: out of buffers\ntorch.errors.ChildFailedError: \n====\n"
    assert deepspeed_offload.reason_of(JobFailed("====", output)) == "AssertionError: out of buffers"
    assert deepspeed_offload.reason_of(JobFailed("no end after 9 s")) == "no end after 9 s"


def test_groups_for_little_memory_are_cut_as_if_three_filled_our_ring() -> None:
    zero = deepspeed_offload.configuration("deepspeed ring", "disk", 80 * MIB)["zero_optimization"]
    buffers = zero["offload_optimizer"]["buffer_count"]
    assert 79 * MIB < 4 * buffers * zero["sub_group_size"] <= 80 * MIB
    assert zero["offload_optimizer"]["nvme_path"] == "disk"
    default = deepspeed_offload.configuration("deepspeed nvme", "disk", 80 * MIB)["zero_optimization"]
    assert default == {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "disk"}}


def test_a_peer_is_compared_round_by_round_and_one_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def ranks(way: str, options: list[str], path: str) -> list[dict[str, Any]]:
        order.append(way)
        if way == "deepspeed ring":
            raise JobFailed("====", "[rank0]: AssertionError: out of buffers")
        return [_rank(), _rank(step_s=4.0 if way == "deepspeed nvme" else 2.0, losses=[3.0, 2.0])]

    monkeypatch.setattr(deepspeed_offload, "unavailable", lambda: None)
    monkeypatch.setattr(offload, "run_ranks", ranks)
    runs, notes = offload.measure(_args())
    once = ["none", "memory", "nvme", "disk", "deepspeed memory", "deepspeed nvme"]
    assert order == [*once, "deepspeed ring", *once]
    assert notes == ["deepspeed ring is skipped: it failed (AssertionError: out of buffers)"]
    text = offload.text_of(_args(), runs, notes)
    assert "nvme over deepspeed nvme: step 0.500 (rounds: 0.500, 0.500), optimizer.step 1.000" in text
    assert "PASS   loss, largest relative difference from deepspeed nvme's: 0 " in text
    assert "over deepspeed ring" not in text

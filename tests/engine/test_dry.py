"""Dry runs: one process acts as any rank of any world, with fake tensors and collectives that only record."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise.engine.lookup import require_engine
from tests.comm.recording import RecordingCollectives
from tests.engine.cases import CASES, FP32, MIXED, Case, dtype_of
from tests.engine.rig import Net, batch, recording, seeded, squares

if TYPE_CHECKING:
    from tests.ranks import RankPools

KINDS = ("param_shards", "gathered_slots", "grad_shards", "reduce_slots", "optimizer", "buffers", "other")

BIG = """
import json, resource, sys, time
import torch, torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
import shardwise as sw
from benchmarks.common.gpt import GPT, GPTShape

rank, world_size = int(sys.argv[1]), 64
torch.set_num_threads(1)
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
shape = GPTShape(layers=80, width=8192, heads=64, vocab=32000, seq=2048)
with FakeTensorMode():
    with torch.device("meta"):
        model = GPT(shape)
    numel = sum(p.numel() for p in model.parameters())
    sw.shard(model, precision=sw.Precision(param="bf16", reduce="fp32"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.zeros(1, shape.seq, dtype=torch.int64)
    for _ in range(2):
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    known = sw.memory(model).peak
print(json.dumps({
    "numel": numel,
    "grown_bytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) * 1024,
    "seconds": time.perf_counter() - start,
    "memory": known,
}))
"""


@pytest.mark.slow
def test_rank_0_of_64_of_a_65_b_model() -> None:
    """Two steps of 80 blocks with AdamW: 1/64 of the state accounted for, in less than 1 GiB and two minutes."""
    run = subprocess.run([sys.executable, "-c", BIG, "0"], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-2000:]
    said = json.loads(run.stdout.splitlines()[-1])
    print(f"{said['seconds']:.1f} s, {said['grown_bytes'] / 2**20:.0f} MiB")
    assert said["numel"] > 64e9
    assert said["grown_bytes"] < 2**30
    assert said["seconds"] < 120
    shard_bytes = 4 * said["numel"] / 64
    for kind, times in (("param_shards", 1), ("grad_shards", 1), ("optimizer", 2)):
        assert said["memory"][kind] == pytest.approx(times * shard_bytes, rel=1e-3)
    slots = 3 * 12 * 8192**2 + 2 * 32000 * 8192 + 2048 * 8192  # blocks, embedding and head, root
    assert said["memory"]["gathered_slots"] == pytest.approx(2 * slots, rel=1e-3)


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Make this process one rank of a fake world inside the block."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_dry(case: Case, rank: int, precision: sw.Precision = FP32) -> tuple[dict[str, int], list[tuple[str, int]]]:
    """Run two steps with AdamW. Returns the memory and the second step's traffic in the shard group."""
    with fake_world(rank, case.world_size), FakeTensorMode(), recording():
        with torch.device("meta"):
            model = seeded(lambda: Net(3))
        model = case.shard(model, precision=precision)
        optimizer = torch.optim.AdamW(model.parameters())
        mesh = require_engine(model).mesh
        assert {group.name for group in mesh.groups} == {"dry"}
        assert mesh.world_size == case.world_size
        for _ in range(2):
            start = [len(group.events) for group in mesh.groups if isinstance(group, RecordingCollectives)]
            loss = squares(model, torch.zeros(5, 4, dtype=dtype_of(precision)))
            assert isinstance(loss, FakeTensor)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {kind: sw.memory(model).peak[kind] for kind in KINDS}, _traffic(model, start)


def _traffic(model: torch.nn.Module, start: list[int]) -> list[tuple[str, int]]:
    groups = [group for group in require_engine(model).mesh.groups if isinstance(group, RecordingCollectives)]
    return [
        (event.op, event.bytes_sent)
        for group, first in zip(groups, start, strict=True)
        for event in group.events[first:]
    ]


def _real(case: Case, precision: sw.Precision) -> tuple[dict[str, int], list[tuple[str, int]]]:
    with recording():
        model = case.shard(seeded(lambda: Net(3)), precision=precision)
    optimizer = torch.optim.AdamW(model.parameters())
    groups = [group for group in require_engine(model).mesh.groups if isinstance(group, RecordingCollectives)]
    for _ in range(2):
        start = [len(group.events) for group in groups]
        squares(model, batch(0).to(dtype_of(precision))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {kind: sw.memory(model).peak[kind] for kind in KINDS}, _traffic(model, start)


@pytest.mark.parametrize("precision", [FP32, MIXED], ids=["fp32", "mixed"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dry_says_what_the_real_one_does(ranks: RankPools, case: Case, precision: sw.Precision) -> None:
    """Memory by kind, to the byte, and every collective of a step in its order: each rank alone, then all together."""
    for rank, real in enumerate(ranks(case.world_size).run(_real, case, precision)):
        assert run_dry(case, rank, precision) == real


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (5, 7), (63, 64), (99_999, 100_000)])
def test_any_rank_of_any_world(rank: int, world_size: int) -> None:
    memory, _ = run_dry(Case("full_shard", world_size), rank)
    assert 0 < memory["grad_shards"] <= memory["param_shards"]

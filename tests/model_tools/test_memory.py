"""What the engine holds, counted from outside: the allocator's own account and the kernel's list of mappings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import device_tools
from shardwise.comm.backends.shared_memory.collectives import STAGE_BYTES
from shardwise.comm.backends.shared_memory.counters import JOURNAL_LINES
from shardwise.engine.lookup import require_engine
from shardwise.model_tools.memory import Memory, replicated
from shardwise.policy.kinds import KINDS
from tests.engine.allocations import Live, new, shared_mapping_bytes, traced
from tests.engine.cases import CASES, FP32, MIXED, Case, collectives, dtype_of
from tests.engine.rig import Net, batch, seeded, squares

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPools

PAGE_BYTES = 4096
LINE_BYTES = 64


def small_net() -> nn.Module:
    return seeded(lambda: Net(3))


class Loop:
    """A sharded model with a fused optimizer; inputs already in the compute dtype."""

    def __init__(self, case: Case, precision: sw.Precision) -> None:
        self.model = case.shard(small_net(), precision=precision)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.dtype = dtype_of(precision)

    def backward(self) -> None:
        squares(self.model, batch(0).to(self.dtype)).backward()

    def step(self, accumulation: int = 1) -> None:
        """The last of `accumulation` backwards reduces."""
        with sw.no_sync(self.model):
            for _ in range(accumulation - 1):
                self.backward()
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _steady_state(case: Case, precision: sw.Precision, name: str, accumulation: int) -> tuple[list[str], list[str]]:
    with collectives(name):
        loop = Loop(case, precision)
        for _ in range(2):
            loop.step(accumulation)
        mapped = shared_mapping_bytes()
        with traced() as allocations:
            loop.step(accumulation)
        assert shared_mapping_bytes() == mapped
    by_dispatch = [a for a in allocations if a.of_optimizer and any("shardwise" in frame for frame in a.frames)]
    assert any(a.nbytes > 0 for a in allocations), "the trace sees nothing"
    return new(allocations), [str(a) for a in by_dispatch if a.nbytes > 0]


@pytest.mark.parametrize("name", ["gloo", "shm"])
@pytest.mark.parametrize("precision", [FP32, MIXED], ids=["fp32", "mixed"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_steady_state_allocates_nothing(ranks: RankPools, case: Case, precision: sw.Precision, name: str) -> None:
    """Nothing in forward, backward and reductions, not even inside operations; nothing in an optimizer's dispatch."""
    for engine, dispatch in ranks(case.world_size).run(_steady_state, case, precision, name, 1):
        assert engine == []
        assert dispatch == []


@pytest.mark.parametrize("precision", [FP32, sw.Precision(param="bf16")], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", [Case("full_shard", 3), Case("no_shard", 3), Case("hybrid_shard", 4)], ids=str)
def test_steady_state_with_no_sync_allocates_nothing(ranks: RankPools, case: Case, precision: sw.Precision) -> None:
    for engine, _ in ranks(case.world_size).run(_steady_state, case, precision, "shm", 3):
        assert engine == []


def _peak(case: Case, precision: sw.Precision, accumulation: int) -> tuple[int, int, dict[str, int]]:
    with collectives("gloo"), traced() as allocations:
        loop = Loop(case, precision)
        for _ in range(3):
            loop.step(accumulation)
        known = sw.memory(loop.model).peak
    live = Live(allocations)
    return (
        live.peak_bytes,
        live.now_bytes,
        {kind: n for kind, n in known.items() if kind not in {"optimizer", "buffers"}},
    )


@pytest.mark.parametrize(("precision", "accumulation"), [(FP32, 1), (MIXED, 2)], ids=["fp32", "mixed-no_sync"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_peak_is_what_sw_memory_says(
    ranks: RankPools, case: Case, precision: sw.Precision, accumulation: int
) -> None:
    """From before `sw.shard` to after the third step, to the byte."""
    for peak, now, known in ranks(case.world_size).run(_peak, case, precision, accumulation):
        assert now == sum(known.values()), known
        assert peak == now


def _against_ddp(case: Case) -> tuple[dict[str, int], dict[str, int], int]:
    loop = Loop(case, FP32)
    loop.step()
    plain = small_net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)
    squares(plain, batch(0)).backward()
    optimizer.step()
    held = {
        "param_shards": sum(p.nbytes for p in plain.parameters()),
        "grad_shards": sum(p.grad.nbytes for p in plain.parameters() if p.grad is not None),
        "optimizer": sum(value.nbytes for state in optimizer.state.values() for value in state.values()),
    }
    return replicated(loop.model), held, sum(sw.memory(loop.model).now.values())


def test_what_ddp_would_hold_is_what_a_plain_model_holds(ranks: RankPools) -> None:
    for computed, held, _ in ranks(2).run(_against_ddp, Case("full_shard", 2)):
        assert {kind: nbytes for kind, nbytes in computed.items() if nbytes} == held


def test_kinds_that_nobody_measured_are_absent() -> None:
    """A CPU's allocator counts nothing, so activations are not 0 but unknown; whatever is there is a kind."""
    model = sw.shard(small_net())
    squares(model, batch(0, 0)).backward()
    for by_kind in (sw.memory(model).now, sw.memory(model).peak):
        assert set(by_kind) == {*KINDS} - {"activations"}


def test_ignored_parameters_are_counted() -> None:
    model = small_net()
    sw.shard(model, ignored=[model.leave.weight])  # type: ignore[union-attr, list-item]
    before = sw.memory(model).now["other"]
    squares(model, batch(0, 0)).backward()
    assert sw.memory(model).now["other"] - before == model.leave.weight.nbytes  # type: ignore[union-attr, operator]
    assert before >= model.leave.weight.nbytes  # type: ignore[union-attr, operator]


def _known_before_the_first_step(case: Case) -> tuple[dict[str, int], dict[str, int]]:
    loop = Loop(case, MIXED)
    before = sw.memory(loop.model).peak
    for _ in range(2):
        loop.step()
    after = sw.memory(loop.model).peak
    return before, after


@pytest.mark.parametrize("case", CASES, ids=str)
def test_slots_and_shards_are_known_before_the_first_step(ranks: RankPools, case: Case) -> None:
    for before, after in ranks(case.world_size).run(_known_before_the_first_step, case):
        for kind in ("param_shards", "gathered_slots", "grad_shards", "reduce_slots"):
            assert before[kind] == after[kind], kind


def _optimizer_bytes(path: str) -> tuple[int, int]:
    loop = Loop(CASES[0], FP32)
    loop.step()
    sw.checkpoint.save(path, loop.model, loop.optimizer)
    resumed = Loop(CASES[0], FP32)
    sw.checkpoint.load(path, resumed.model, resumed.optimizer)
    return sw.memory(loop.model).now["optimizer"], sw.memory(resumed.model).now["optimizer"]


def test_loaded_optimizer_state_counts_before_the_first_step(ranks: RankPools, tmp_path: Path) -> None:
    for stepped, loaded in ranks(CASES[0].world_size).run(_optimizer_bytes, str(tmp_path / "saved")):
        assert loaded == stepped > 0


def test_printed_it_is_a_table_of_what_there_is() -> None:
    table = str(Memory({"param_shards": 1536, "buffers": 0}, {"param_shards": 2048, "buffers": 0})).splitlines()
    assert [line.split() for line in table] == [
        ["this", "rank", "now", "peak"],
        ["param_shards", "1.5", "KiB", "2.0", "KiB"],
        ["together", "1.5", "KiB", "2.0", "KiB"],
    ]


def test_what_is_elsewhere_has_columns() -> None:
    table = str(Memory({"param_shards": 1536, "optimizer": 0}, {"param_shards": 1536}, {}, {"optimizer": 4096}))
    assert [line.split() for line in table.splitlines()] == [
        ["this", "rank", "now", "peak", "disk"],
        ["param_shards", "1.5", "KiB", "1.5", "KiB", "0", "B"],
        ["optimizer", "0", "B", "0", "B", "4.0", "KiB"],
        ["together", "1.5", "KiB", "1.5", "KiB", "4.0", "KiB"],
    ]


def _shared(case: Case) -> tuple[int, int]:
    already = set(shared_mapping_bytes())
    with collectives("shm"):
        loop = Loop(case, FP32)
        loop.step()
    engine = require_engine(loop.model)
    expected = 0
    for group in engine.mesh.groups:
        if group.world_size > 1:
            lines = group.world_size * (1 + JOURNAL_LINES)
            expected += _pages(lines * LINE_BYTES + 8) + group.world_size * 2 * STAGE_BYTES
    arenas = [(slot, 1) for slot in engine.unsharder.all_slots]
    reduce = [(slot, slot.collectives.world_size) for slot in engine.reducer.slots.all]
    for slot, parts in arenas + reduce:
        if slot.collectives.world_size > 1:
            expected += _pages(3 * slot.collectives.world_size * LINE_BYTES + 8) + parts * _pages(
                slot.buffer.bytes.numel()
            )
    mapped = {inode: nbytes for inode, nbytes in shared_mapping_bytes().items() if inode not in already}
    return sum(mapped.values()), expected


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shared_mappings_are_the_slots(ranks: RankPools, case: Case) -> None:
    """All that a rank maps: each gathered slot once for all ranks of its group, each reduce slot once a rank, in whole
    pages behind the lines of its counters; and the stage through which small tensors pass."""
    for mapped, expected in ranks(case.world_size).run(_shared, case):
        assert mapped == expected


class Allocator:
    """A device's account of itself, as `torch.accelerator` gives it."""

    def __init__(self, now: int, peak: int) -> None:
        self.now = now
        self.peak = peak

    def memory_allocated(self, device: torch.device) -> int:
        return self.now

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.now


def test_what_built_the_model_is_no_activation_once_the_peak_is_reset() -> None:
    device = torch.device("xpu", 0)
    model = sw.shard(small_net())
    held = sum(sw.memory(model).now.values())
    engine = require_engine(model)
    allocator = Allocator(now=held + 8, peak=held + 1000)  # the whole model was there
    with (
        mock.patch.object(engine, "mesh", replace(engine.mesh, device=device)),
        mock.patch.object(torch, "accelerator", allocator),
    ):
        assert sw.memory(model).peak["activations"] == 1000
        device_tools.reset_peak(device)
        assert sw.memory(model).peak["activations"] == 8
        allocator.now, allocator.peak = held + 8, held + 500  # a step
        memory = sw.memory(model)
    assert (memory.now["activations"], memory.peak["activations"]) == (8, 500)

"""Bytes on the wire: every strategy sends what its row of the table says, computed here from parameter sizes alone.

They are counted twice: by recording collectives inside the engine, and by a wrapper around c10d outside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import shardwise as sw
from benchmarks.steps.wire import counting
from shardwise.engine.lookup import require_engine
from tests.comm.recording import RecordingCollectives
from tests.engine.cases import CASES, FP32, MIXED, Case, collectives, dtype_of
from tests.engine.rig import Block, Net, batch, recording, seeded, squares

if TYPE_CHECKING:
    from tests.ranks import RankPools

WIDTH, DEPTH = 100, 3


class Wide(Net):
    """A model large enough that no message of parameters or gradients is taken for control traffic."""

    def __init__(self) -> None:
        super().__init__(DEPTH, lambda: Block(WIDTH))
        self.enter, self.leave = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 101)


BLOCK = (WIDTH, WIDTH, (2 * WIDTH + 1) * WIDTH, 2 * WIDTH + 1, WIDTH * (2 * WIDTH + 1), WIDTH)
ROOT = (4 * WIDTH, WIDTH, WIDTH * 101, 101)
UNITS = (ROOT, *[BLOCK] * DEPTH)
PARAMETERS = sum(map(len, UNITS))
AGREEMENT_BYTES = 33
"""Bytes of the message by which ranks agree that they did the same: two hashes with their ranks."""
HEADER_BYTES = 16
"""Bytes sent to each peer before each collective between hosts: which collective it is, and its length."""


@dataclass(frozen=True)
class Widths:
    """Bytes of an element of parameters and of gradients while they are sent."""

    param: int
    reduce: int

    def padded_numel(self, unit: tuple[int, ...], ranks: int) -> int:
        """Return a padded number of elements: parameters and slices are aligned to 16 bytes in the narrower dtype."""
        align = 16 // min(4, self.param, self.reduce)  # masters are fp32
        end = 0
        for numel in unit:
            end = -(-end // align) * align + numel
        return -(-end // (align * ranks)) * align * ranks


def table(case: Case, widths: Widths) -> dict[str, int]:
    """Return the bytes that a rank sends in a step, by kind."""
    n, r = case.shards, case.replicas
    sent = {"gather": 0, "reduce": 0, "across": 0}
    for index, unit in enumerate(UNITS):
        numel = widths.padded_numel(unit, n)
        gathers = [n]
        if case.strategy in {"full_shard", "hybrid_shard"} and index not in {0, len(UNITS) - 1}:
            gathers.append(case.reshard or n)  # again for backward; the root and the last block stay
        sent["gather"] += sum(numel * widths.param * (group - 1) // group for group in gathers)
        sent["reduce"] += numel * widths.reduce * (n - 1) // n
        sent["across"] += 2 * (numel // n) * widths.reduce * (r - 1) // r
    return sent


def widths_of(precision: sw.Precision) -> Widths:
    return Widths(2, 4) if precision == MIXED else Widths(4, 4)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    squares(model, batch(0).to(dtype)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _recorded(case: Case, precision: sw.Precision) -> tuple[dict[str, int], dict[str, int]]:
    with recording():
        model = case.shard(seeded(Wide), precision=precision)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        _step(model, optimizer, dtype_of(precision))
    mesh = require_engine(model).mesh
    groups = [group for group in mesh.groups if isinstance(group, RecordingCollectives)]
    before = [len(group.events) for group in groups]
    _step(model, optimizer, dtype_of(precision))
    sent = {"gather": 0, "reduce": 0, "across": 0, "control": 0}
    kinds = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "across", "exchange": "control"}
    calls = dict.fromkeys(sent, 0)
    for group, start in zip(groups, before, strict=True):
        for event in group.events[start:]:
            if event.op in kinds:
                sent[kinds[event.op]] += event.bytes_sent
                calls[kinds[event.op]] += 1
    return sent, calls


@pytest.mark.parametrize("precision", [FP32, MIXED], ids=["fp32", "mixed"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_recorded_bytes_are_the_tables(ranks: RankPools, case: Case, precision: sw.Precision) -> None:
    """And besides, in each group of ranks, what they agree on: after a forward that gathered that they did the same,
    after backward that and one byte a parameter, which were used."""
    expected = table(case, widths_of(precision))
    groups = [size for size in (case.shards, case.replicas) if size > 1]
    agreements = [AGREEMENT_BYTES] * (case.shards > 1) + [AGREEMENT_BYTES + PARAMETERS]
    flags = sum(2 * nbytes for nbytes in agreements for _ in groups)
    for sent, calls in ranks(case.world_size).run(_recorded, case, precision):
        assert sent == {**expected, "control": flags}
        resharded = DEPTH - 1 if case.strategy in {"full_shard", "hybrid_shard"} else 0
        sharded = case.shards > 1
        assert calls["gather"] == (len(UNITS) + resharded if sharded else 0)
        assert calls["reduce"] == (len(UNITS) if sharded else 0)
        assert calls["across"] == (len(UNITS) if case.replicas > 1 else 0)
        assert calls["control"] == len(groups) * len(agreements)


def _on_the_wire(case: Case, precision: sw.Precision) -> tuple[int, list[str]]:
    with collectives("gloo"):
        model = case.shard(seeded(Wide), precision=precision)
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer, dtype_of(precision))
    with counting() as wire:
        _step(model, optimizer, dtype_of(precision))
    assert wire.total_sent_bytes == int(wire.total_sent_bytes)
    return int(wire.total_sent_bytes), sorted(wire.calls)


@pytest.mark.parametrize("precision", [FP32, MIXED], ids=["fp32", "mixed"])
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.strategy != "no_shard" or case.world_size == 2], ids=str
)
def test_bytes_through_c10d_are_the_tables(ranks: RankPools, case: Case, precision: sw.Precision) -> None:
    """The same, counted where the engine hands its messages to torch: everything is sent pairwise, headers and what
    ranks agree on go to every peer whole."""
    resharded = DEPTH - 1 if case.strategy in {"full_shard", "hybrid_shard"} else 0
    peers = [size - 1 for size in (case.shards, case.replicas)]
    agreed = (AGREEMENT_BYTES * (case.shards > 1) + AGREEMENT_BYTES + PARAMETERS) * sum(peers)
    collectives = [(2 * len(UNITS) + resharded) * (case.shards > 1), len(UNITS)]
    if case.reshard is not None:  # backward gathers in smaller groups
        peers[0:1], collectives[0:1] = [case.shards - 1, case.reshard - 1], [2 * len(UNITS), resharded]
    headers = sum(HEADER_BYTES * number * count for number, count in zip(collectives, peers, strict=True))
    headers += HEADER_BYTES * (1 + (case.shards > 1)) * sum(size - 1 for size in (case.shards, case.replicas))
    expected = sum(table(case, widths_of(precision)).values()) + agreed + headers
    for sent, calls in ranks(case.world_size).run(_on_the_wire, case, precision):
        assert calls == ["send"]
        assert sent == expected


@pytest.mark.parametrize("world_size", [3])
def test_no_shard_through_c10d_where_ranks_do_not_divide(ranks: RankPools, world_size: int) -> None:
    """Shares of an indivisible buffer differ by rank; together they are 2 P (N - 1)."""
    case = Case("no_shard", world_size)
    outcomes = ranks(world_size).run(_on_the_wire, case, FP32)
    total = sum(Widths(4, 4).padded_numel(unit, 1) * 4 for unit in UNITS)
    agreed = (AGREEMENT_BYTES + PARAMETERS) * (world_size - 1) * world_size
    headers = HEADER_BYTES * (len(UNITS) + 1) * (world_size - 1) * world_size
    assert sum(sent for sent, _ in outcomes) == 2 * total * (world_size - 1) + agreed + headers


# The order of a step --------------------------------------------------------------------------------------------------


def _order(strategy: str) -> list[tuple[str, int | None]]:
    with recording():
        model = sw.shard(seeded(Wide), strategy)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        _step(model, optimizer, torch.float32)
    group = require_engine(model).mesh.shard
    assert isinstance(group, RecordingCollectives)
    start = len(group.events)
    _step(model, optimizer, torch.float32)
    return [(event.op, event.buffer) for event in group.events[start:]]


# Gathered slots 0, 1, 2 are the blocks', 3 the root's; reduce slots 4 and 5 are shared by the blocks, 6 is the root's.
FULL_SHARD = [
    ("claim", 3), ("all_gather", 3),  # the root's forward
    ("claim", 0), ("all_gather", 0),  # ... and, ahead of time, its first block
    ("claim", 1), ("all_gather", 1),  # in the first block: the second
    ("release", 0),
    ("claim", 2), ("all_gather", 2),
    ("release", 1),
    ("claim", 1), ("all_gather", 1),  # in the last block, which stays: the one before, for backward
    ("exchange", None),  # before the output is returned: whether ranks did the same
    ("claim", 6),  # backward: the root collects gradients from here to the end
    ("claim", 4), ("reduce_scatter", 4), ("release", 2),  # the last block
    ("claim", 5), ("claim", 0), ("all_gather", 0),  # the second; the first is gathered meanwhile
    ("reduce_scatter", 5), ("release", 1),
    ("claim", 4), ("reduce_scatter", 4), ("release", 0),
    ("reduce_scatter", 6), ("release", 3),
    ("exchange", None),  # the same of backward, and which parameters were used
]  # fmt: skip


def test_the_order_of_a_full_shard_step(ranks: RankPools) -> None:
    """Three blocks, three slots: each gather starts one unit ahead, each reduction when its unit's backward is over."""
    for order in ranks(2).run(_order, "full_shard"):
        assert order == FULL_SHARD


def test_the_order_of_a_step_that_keeps_parameters(ranks: RankPools) -> None:
    """Gathered afresh after the optimizer's step, in forward order; never again in backward."""
    for order in ranks(2).run(_order, "shard_grad_op"):
        assert [buffer for op, buffer in order if op == "all_gather"] == [3, 0, 1, 2]
        assert [buffer for op, buffer in order if op == "reduce_scatter"] == [4, 5, 4, 6]
        assert [op for op, _ in order if op == "exchange"] == ["exchange"] * 2

"""The events and bytes that RecordingCollectives records."""

from __future__ import annotations

import torch

from shardwise.fsdp.collectives import BufferKind, FlatSpan, Reduction
from shardwise.fsdp.torch_collectives import DryCollectives
from tests.comm.naive import collectives
from tests.comm.recording import Event, RecordingCollectives
from tests.ranks import RankPools


def exercise(comm: RecordingCollectives) -> None:
    n = comm.world_size
    gather = comm.allocate(n * 96, BufferKind.GATHER)
    reduce = comm.allocate(n * 64, BufferKind.REDUCE)
    comm.claim(gather)
    gather.bytes.zero_()
    comm.all_gather(gather, (FlatSpan(0, 64), FlatSpan(64 * n, 32))).wait()
    comm.release(comm.replace(gather))
    comm.claim(reduce)
    flat = reduce.bytes.view(torch.bfloat16).zero_()
    comm.reduce_scatter(reduce, (Reduction(flat, torch.zeros(32), False),)).wait()
    comm.all_reduce(torch.zeros(30_000)).wait()
    comm.all_reduce(torch.zeros(1), "max").wait()
    comm.broadcast(torch.zeros(5), 0)
    comm.barrier()


def exercised(kind: str) -> list[Event]:
    comm = RecordingCollectives(collectives(kind))
    exercise(comm)
    return comm.events


def test_bytes_and_order() -> None:
    comm = RecordingCollectives(DryCollectives(0, 4, "cpu"))
    exercise(comm)
    assert comm.bytes_sent() == {
        "all_gather": 3 * 96,
        "reduce_scatter": 3 * 32 * 2,
        "all_reduce": 2 * 3 * 120_000 // 4,
        "control": 6 + 3 * 20,
    }
    ops = "allocate allocate claim all_gather replace release claim reduce_scatter all_reduce control control control"
    assert [event.op for event in comm.events] == ops.split()
    assert [event.sequence for event in comm.events] == list(range(12))
    assert comm.events[3] == Event(3, "all_gather", 0, 288)
    assert comm.events[7] == Event(7, "reduce_scatter", 1, 192, (torch.bfloat16,))


def test_every_implementation_gives_the_same_account(ranks: RankPools) -> None:
    comm = RecordingCollectives(DryCollectives(1, 2, "cpu"))
    exercise(comm)
    for kind in ("gloo", "shm"):
        assert ranks(2).run(exercised, kind)[1] == comm.events

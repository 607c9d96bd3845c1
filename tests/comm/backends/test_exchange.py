"""Tests that gloo, shm and torch's own collectives must pass: exact results, whatever the timing."""

from __future__ import annotations

import random
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.comm.all_to_all import AllToAllPart, all_to_all
from shardwise.comm.backends import gloo
from shardwise.comm.backends.shared_memory import collectives as shm
from shardwise.fsdp.collectives import BufferKind, FlatSpan, Reduction, Work
from tests.comm.naive import FLOATS, KINDS, collectives, same_bits, sum_in_rank_order, values
from tests.ranks import RankPools

ALL = [(kind, n) for kind in (*KINDS, "torch") for n in (2, 3, 4)]
everywhere = pytest.mark.parametrize(("kind", "world_size"), ALL)
TWO_TERMS = ("torch", 2)  # whose sum is the same in any order
in_rank_order = pytest.mark.parametrize(("kind", "world_size"), [c for c in ALL if c[0] in KINDS or c == TWO_TERMS])
OPTIONS = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def gather_rounds(kind: str, rounds: int) -> None:
    """Gather in three slots as an arena uses them: one is claimed and posted before the last is read. Ranks are out of
    step."""
    comm = collectives(kind)
    spans = (FlatSpan(0, 24), FlatSpan(24 * comm.world_size, 1000), FlatSpan(1024 * comm.world_size + 64, 8))
    slots = [comm.allocate(1100 * comm.world_size + 64, BufferKind.GATHER) for _ in range(3)]
    skew = random.Random(comm.rank)

    def start(number: int) -> Work:
        buffer = slots[number % 3]
        comm.claim(buffer)
        for which, span in enumerate(spans):
            own = span.start + comm.rank * span.shard_bytes
            buffer.bytes[own : own + span.shard_bytes] = (number + 7 * comm.rank + which) % 251
        if skew.random() < 0.2:
            time.sleep(skew.random() * 0.003)
        return comm.all_gather(buffer, spans)

    work = start(0)
    for number in range(rounds):
        ahead = start(number + 1)
        work.wait()
        work.wait()
        for which, span in enumerate(spans):
            for rank in range(comm.world_size):
                theirs = slots[number % 3].bytes[span.start + rank * span.shard_bytes :][: span.shard_bytes]
                assert theirs.eq((number + 7 * rank + which) % 251).all(), (number, which, rank)
        if skew.random() < 0.2:
            time.sleep(skew.random() * 0.003)
        comm.release(slots[number % 3])
        work = ahead
    work.wait()


def reduce_cases(kind: str, cases: list[tuple[torch.dtype, torch.dtype, bool, int]]) -> None:
    """Run one reduce-scatter per case with three reductions: into a separate output, in place, and of no elements."""
    comm = collectives(kind)
    for seed, (dtype, out_dtype, accumulate, numel) in enumerate(cases):
        n, r = comm.world_size, comm.rank
        buffer = comm.allocate((2 * numel * n + 64) * dtype.itemsize, BufferKind.REDUCE)
        comm.claim(buffer)
        flats = [buffer.bytes.view(dtype)[start : start + numel * n] for start in (0, numel * n)]
        terms = [[values(2 * seed + i, q, numel * n, dtype) for q in range(n)] for i in range(2)]
        for flat, by_rank in zip(flats, terms, strict=True):
            flat.copy_(by_rank[r])
        out = values(99, r, numel, out_dtype)
        before = out.clone()
        own = slice(r * numel, (r + 1) * numel)
        reductions = (
            Reduction(flats[0], out, accumulate),
            Reduction(flats[1], flats[1][own], False),
            Reduction(flats[0][:0], out[:0], accumulate),
        )
        work = comm.reduce_scatter(buffer, reductions)
        work.wait()
        work.wait()
        total = sum_in_rank_order([t[own] for t in terms[0]])
        assert same_bits(out, before.add_(total) if accumulate else total.to(out_dtype)), (dtype, out_dtype)
        assert same_bits(flats[1][own], sum_in_rank_order([t[own] for t in terms[1]]).to(dtype)), dtype


def reduce_rounds(kind: str, rounds: int) -> None:
    """Reduce in two slots, one reduction in flight, ranks out of step: no rank overwrites what another still reads."""
    comm = collectives(kind)
    n, r, numel = comm.world_size, comm.rank, 3001
    slots = [comm.allocate(numel * n * 4, BufferKind.REDUCE) for _ in range(2)]
    outs = [torch.zeros(numel) for _ in slots]
    skew = random.Random(r)
    flying: tuple[int, Work] | None = None
    for number in range(rounds + 1):
        buffer, out = slots[number % 2], outs[number % 2]
        comm.claim(buffer)
        flat = buffer.bytes.view(torch.float32)
        flat.copy_(torch.arange(numel * n)).mul_(r + 1).add_(number)
        if skew.random() < 0.2:
            time.sleep(skew.random() * 0.003)
        if flying is not None:
            done, work = flying
            work.wait()
            expected = torch.arange(r * numel, (r + 1) * numel) * (n * (n + 1) // 2) + n * done
            assert outs[done % 2].equal(expected.float()), done
        flying = number, comm.reduce_scatter(buffer, (Reduction(flat, out, False),))
    assert flying is not None
    flying[1].wait()


def all_reduce_cases(kind: str, cases: list[tuple[torch.dtype, str, tuple[int, ...]]]) -> None:
    comm = collectives(kind)
    for seed, (dtype, op, shape) in enumerate(cases):
        numel = torch.Size(shape).numel()
        terms = [values(seed, rank, numel, dtype) for rank in range(comm.world_size)]
        tensor = terms[comm.rank].clone().view(shape).requires_grad_(dtype.is_floating_point and seed % 2 == 0)
        comm.all_reduce(tensor, op).wait()
        expected = sum_in_rank_order(terms).to(dtype) if op == "sum" else torch.stack(terms).amax(0)
        assert same_bits(tensor.detach().view(-1), expected), (dtype, op, shape)


def all_reduce_in_buffer(kind: str) -> None:
    """All-reduce two tensors in one reduce buffer at once, and overwrite them as soon as both results are there."""
    comm = collectives(kind)
    buffer = comm.allocate(4 * 1000, BufferKind.REDUCE)
    for number in range(20):
        comm.claim(buffer)
        one, two = (buffer.bytes.view(torch.float32)[a:b] for a, b in ((1, 334), (334, 991)))
        terms = [values(number, rank, 1000, torch.float32) for rank in range(comm.world_size)]
        buffer.bytes.view(torch.float32).copy_(terms[comm.rank])
        works = comm.all_reduce(one), comm.all_reduce(two, "max")
        works[1].wait()
        works[0].wait()
        assert same_bits(one, sum_in_rank_order([t[1:334] for t in terms]))
        assert same_bits(two, torch.stack(terms)[:, 334:991].amax(0))
        buffer.bytes.fill_(number)


def all_reduces_behind_reductions(kind: str, rounds: int) -> None:
    """Issue an all-reduce of each reduction's result right after the reduction, and wait for it up to three rounds
    later. Ranks are out of step; slices are large and small, inside a buffer and outside."""
    comm, other = collectives(kind), collectives(kind)
    n, r = comm.world_size, comm.rank
    skew = random.Random(r)
    for numel in (16, 40_000):
        slots = [comm.allocate(4 * numel * n, BufferKind.REDUCE) for _ in range(2)]
        inside = [other.allocate(4 * numel, BufferKind.REDUCE).bytes.view(torch.float32) for _ in range(2)]
        outs = [*inside, torch.empty(numel)]
        flying: list[tuple[int, Work, Work]] = []

        def finish(numel: int = numel, outs: list[torch.Tensor] = outs, flying: list = flying) -> None:  # type: ignore[type-arg]
            number, scattered, summed = flying.pop(0)
            summed.wait()
            scattered.wait()
            summed.wait()
            once = [
                sum_in_rank_order([values(number, q, numel * n, torch.float32)[s * numel :][:numel] for q in range(n)])
                for s in range(n)
            ]
            assert same_bits(outs[number % 3], sum_in_rank_order(once)), number

        for number in range(rounds):
            if number >= 2:
                flying[-2][1].wait()  # its slot is wanted, not yet the sum over all
            if len(flying) == 3:
                finish()
            buffer, out = slots[number % 2], outs[number % 3]
            comm.claim(buffer)
            flat = buffer.bytes.view(torch.float32)
            flat.copy_(values(number, r, numel * n, torch.float32))
            if skew.random() < 0.2:
                time.sleep(skew.random() * 0.003)
            scattered = comm.reduce_scatter(buffer, (Reduction(flat, out, False),))
            flying.append((number, scattered, other.all_reduce(out, after=scattered)))
        while flying:
            finish()


def broadcasts(kind: str, shapes: list[tuple[int, ...]]) -> None:
    comm = collectives(kind)
    for src in range(comm.world_size):
        for shape in shapes:
            tensor = torch.full(shape, comm.rank, dtype=torch.int16)
            comm.broadcast(tensor, src)
            assert tensor.eq(src).all()
            assert tensor.shape == shape


def run_program(kind: str, steps: list[tuple[str, int]]) -> None:
    """Run a program: calls on two gather and two reduce buffers, in any order."""
    comm = collectives(kind)
    n, r = comm.world_size, comm.rank
    gathers = [comm.allocate(n * 64, BufferKind.GATHER) for _ in range(2)]
    reduces = [comm.allocate(n * 64, BufferKind.REDUCE) for _ in range(2)]
    for number, (step, which) in enumerate(steps):
        if step == "gather":
            comm.claim(gathers[which])
            gathers[which].bytes.view(n, 64)[r] = (number + r) % 256
            comm.all_gather(gathers[which], (FlatSpan(0, 64),)).wait()
            assert gathers[which].bytes.view(n, 64)[:, 5].tolist() == [(number + q) % 256 for q in range(n)]
            comm.release(gathers[which])
        elif step == "replace":
            comm.claim(gathers[which])
            gathers[which].bytes.view(n, 64)[r] = number + r
            comm.all_gather(gathers[which], (FlatSpan(0, 64),)).wait()
            gathers[which] = comm.replace(gathers[which])
            comm.release(gathers[which])
        elif step == "reduce":
            comm.claim(reduces[which])
            flat, out = reduces[which].bytes.view(torch.float32), torch.empty(16)
            flat.fill_(number + r)
            comm.reduce_scatter(reduces[which], (Reduction(flat, out, False),)).wait()
            assert out.eq(n * number + n * (n - 1) // 2).all()
        elif step == "all_reduce":
            tensor = torch.full((which * 40000 + 1,), r + number)
            comm.all_reduce(tensor, "max").wait()
            assert tensor.eq(n - 1 + number).all()
        else:
            comm.barrier()


@everywhere
def test_gathers_one_ahead(ranks: RankPools, kind: str, world_size: int) -> None:
    ranks(world_size).run(gather_rounds, kind, 60)


@in_rank_order
def test_reductions_in_rank_order(ranks: RankPools, kind: str, world_size: int) -> None:
    mixed = [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.bfloat16)]
    dtypes = [(dtype, dtype) for dtype in FLOATS] + mixed + [(torch.float32, torch.float64)]
    cases = [(dtype, out, accumulate, 1003) for dtype, out in dtypes for accumulate in (False, True)]
    ranks(world_size).run(reduce_cases, kind, [*cases, (torch.float32, torch.float32, False, 300_001)])


@everywhere
def test_reductions_out_of_step(ranks: RankPools, kind: str, world_size: int) -> None:
    ranks(world_size).run(reduce_rounds, kind, 40)


@in_rank_order
def test_all_reduce(ranks: RankPools, kind: str, world_size: int) -> None:
    shapes: list[tuple[int, ...]] = [(), (1,), (0,), (3, 5), (300_001,)]
    cases = [(dtype, op, shape) for dtype in (*FLOATS, torch.int64) for op in ("sum", "max") for shape in shapes]
    ranks(world_size).run(all_reduce_cases, kind, cases)


@in_rank_order
def test_all_reduce_inside_a_reduce_buffer(ranks: RankPools, kind: str, world_size: int) -> None:
    ranks(world_size).run(all_reduce_in_buffer, kind)


@in_rank_order
def test_all_reduce_behind_a_reduction_in_another_group(ranks: RankPools, kind: str, world_size: int) -> None:
    ranks(world_size).run(all_reduces_behind_reductions, kind, 12)


@everywhere
def test_broadcast(ranks: RankPools, kind: str, world_size: int) -> None:
    ranks(world_size).run(broadcasts, kind, [(), (7,), (0,), (3, 400_000)])


@everywhere
@OPTIONS
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["gather", "replace", "reduce", "all_reduce", "barrier"]), st.integers(0, 1)),
        max_size=12,
    )
)
def test_any_program(ranks: RankPools, kind: str, world_size: int, steps: list[tuple[str, int]]) -> None:
    ranks(world_size).run(run_program, kind, steps)


def small_pieces(kind: str) -> None:
    staging, stage = gloo.STAGING_BYTES, shm.STAGE_BYTES
    try:
        gloo.STAGING_BYTES, shm.STAGE_BYTES = 4096, 4096
        reduce_cases(kind, [(torch.bfloat16, torch.float32, True, 5003), (torch.float64, torch.float64, False, 999)])
        all_reduce_cases(kind, [(torch.bfloat16, "sum", (40_001,)), (torch.float32, "max", (33_333,))])
    finally:
        gloo.STAGING_BYTES, shm.STAGE_BYTES = staging, stage


@in_rank_order
def test_many_pieces(ranks: RankPools, kind: str, world_size: int) -> None:
    ranks(world_size).run(small_pieces, kind)


def all_to_all_rounds(kind: str, rounds: int) -> None:
    """Keep two all-to-alls under way in two buffers, with other sizes each time; some ranks send nothing."""
    comm = collectives(kind)
    n = comm.world_size
    buffers = [comm.allocate(64 * n, BufferKind.REDUCE) for _ in range(2)]
    skew = random.Random(comm.rank)

    def size(number: int, source: int, target: int) -> int:
        return 0 if source == target else (5 * number + 3 * source + target) % 4 * 16

    def start(number: int) -> tuple[Work, torch.Tensor]:
        parts = tuple(
            AllToAllPart(source, target, size(number, source, target))
            for source in range(n)
            for target in range(n)
            if size(number, source, target)
        )
        buffer = buffers[number % 2]
        comm.claim(buffer)
        begin = 0
        for part in parts:
            if part.source == comm.rank:
                buffer.bytes[begin : begin + part.nbytes] = (number + 7 * comm.rank + 3 * part.target) % 251
                begin += part.nbytes
        into = torch.zeros(sum(part.nbytes for part in parts if part.target == comm.rank), dtype=torch.uint8)
        return all_to_all(comm, buffer, parts, into), into

    def check(number: int, into: torch.Tensor) -> None:
        expected = [
            torch.full((size(number, source, comm.rank),), (number + 7 * source + 3 * comm.rank) % 251)
            for source in range(n)
        ]
        assert torch.equal(into, torch.cat(expected).to(torch.uint8))

    under_way = [start(0)]
    for number in range(rounds):
        under_way.append(start(number + 1))
        work, into = under_way.pop(0)
        if skew.random() < 0.2:
            time.sleep(skew.random() * 0.003)
        work.wait()
        check(number, into)
    under_way[0][0].wait()


@everywhere
def test_parts_arrive_where_they_belong(ranks: RankPools, kind: str, world_size: int) -> None:
    ranks(world_size).run(all_to_all_rounds, kind, 40)

"""Tests of shm alone: which process maps which memory, when it is unmapped, and peers that die."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from shardwise.errors import CollectiveTimeout, MismatchError, ShardwiseError
from shardwise.fsdp.collectives import Buffer, BufferKind, Collectives, FlatSpan, Reduction, Work
from shardwise.liveness import birth
from tests.comm.naive import collectives
from tests.ranks import RankPool, RankPools

if TYPE_CHECKING:
    from collections.abc import Iterator


def gather(comm: Collectives, buffer: Buffer, value: int) -> Work:
    comm.claim(buffer)
    share = buffer.bytes.numel() // comm.world_size
    buffer.bytes[comm.rank * share : (comm.rank + 1) * share] = value
    return comm.all_gather(buffer, (FlatSpan(0, share),))


def segments() -> list[str]:
    """Return all shared memory that this process maps."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "rw-s" in line]


def views_of_replaced() -> None:
    comm = collectives("shm")
    buffer = comm.allocate(10_000 * comm.world_size, BufferKind.GATHER)
    gather(comm, buffer, 1).wait()
    stash, address = buffer.bytes[5:], buffer.bytes.data_ptr()
    replacement = comm.replace(buffer) if comm.rank == 1 else buffer
    assert (replacement.index, replacement.kind) == (buffer.index, buffer.kind)
    assert replacement.bytes.eq(1).all(), "the replacement is the same shared memory"
    comm.release(replacement)
    gather(comm, replacement, 2).wait()
    assert replacement.bytes.eq(2).all()
    comm.release(replacement)
    if comm.rank == 1:
        assert stash.data_ptr() == address + 5
        assert stash.eq(1).all(), "a stashed view keeps its values"
        stash.fill_(77)
    else:
        comm.barrier()
    if comm.rank == 1:
        comm.barrier()
    assert not replacement.bytes.eq(77).any(), "what is written to a stashed view stays private"
    del stash, buffer


def replaced_reduce_buffer() -> None:
    comm = collectives("shm")
    buffer = comm.allocate(4 * comm.world_size, BufferKind.REDUCE)
    for number in range(3):
        comm.claim(buffer)
        flat, out = buffer.bytes.view(torch.float32), torch.empty(1)
        flat.fill_(number)
        comm.reduce_scatter(buffer, (Reduction(flat, out, False),)).wait()
        assert out.item() == number * comm.world_size
        buffer = comm.replace(buffer)
        assert flat.eq(number).all()
        tensor = buffer.bytes.view(torch.float32)
        comm.claim(buffer)
        tensor.fill_(comm.rank)
        comm.all_reduce(tensor, "max").wait()
        assert tensor.eq(comm.world_size - 1).all()


def advanced() -> tuple[float, float]:
    """Return the value of a reduction's output before the last rank has posted, and after that and an `advance`."""
    comm = collectives("shm")
    is_last = comm.rank == comm.world_size - 1
    buffer = comm.allocate(4 * comm.world_size, BufferKind.REDUCE)
    comm.claim(buffer)
    flat, out = buffer.bytes.view(torch.float32), torch.full((1,), -1.0)
    flat.fill_(comm.rank + 1)
    reductions = (Reduction(flat, out, False),)
    if not is_last:
        comm.reduce_scatter(buffer, reductions)
        comm.advance()
    before = out.item()
    comm.barrier()
    if is_last:
        comm.reduce_scatter(buffer, reductions)
    comm.barrier()
    comm.advance()
    after = out.item()  # formed, though nobody waited for it
    comm.barrier()
    comm.claim(buffer)
    return before, after


def advanced_in_order() -> float:
    """Return what two reductions leave in one output: the first from the younger buffer, the second, which adds, from
    the older one."""
    comm = collectives("shm")
    buffers = [comm.allocate(4 * comm.world_size, BufferKind.REDUCE) for _ in range(2)]
    out = torch.full((1,), -1.0)
    for buffer, accumulate, value in ((buffers[1], False, 10), (buffers[0], True, 1)):
        comm.claim(buffer)
        flat = buffer.bytes.view(torch.float32)
        flat.fill_(value)
        comm.reduce_scatter(buffer, (Reduction(flat, out, accumulate),))
    comm.barrier()
    comm.advance()
    return out.item()


def poison() -> None:
    comm = collectives("shm", poison=True)
    buffer = comm.allocate(1001 * 4, BufferKind.GATHER)
    assert buffer.bytes.view(torch.float32).isnan().all()
    comm.barrier()
    for number in range(30):
        comm.claim(buffer)
        own = slice(comm.rank * 100, (comm.rank + 1) * 100)
        buffer.bytes[own] = number
        comm.all_gather(buffer, (FlatSpan(0, 100),)).wait()
        assert buffer.bytes[: 100 * comm.world_size].eq(number).all()
        comm.release(buffer)
        if number % 7 == comm.rank:
            time.sleep(0.001)
        others = torch.ones(buffer.bytes.numel(), dtype=torch.bool)
        others[: 100 * comm.world_size] = False  # peers may have claimed the buffer again
        others[own] = True
        assert buffer.bytes[others].eq(0xFF).all()


def nothing_left() -> tuple[list[str], list[str]]:
    """Return the shared memory and descriptors that 30 collectives leave behind, with the garbage collector off."""
    gc.disable()
    for number in range(30):
        comm = collectives("shm")
        buffers = [comm.allocate(5000, kind) for kind in BufferKind]
        gather(comm, buffers[0], 3).wait()
        work = comm.reduce_scatter(buffers[1], ())
        if number % 2:
            work.wait()
        else:
            comm.close()
            comm.close()
        del comm, buffers, work
    descriptors = [str(fd.resolve()) for fd in Path("/proc/self/fd").iterdir()]
    return segments(), [descriptor for descriptor in descriptors if "memfd" in descriptor]


def mapped() -> list[str]:
    comm = collectives("shm")
    kept = [comm.allocate(5000, kind) for kind in BufferKind]
    assert kept
    return segments()


def other_order() -> str:
    """Have two ranks wait for each other in different buffers, which only what they have posted reveals."""
    comm = collectives("shm")
    comm.labels.update({1: "the gather of one", 2: "the gather of two"})
    one, two = (comm.allocate(400 * comm.world_size, BufferKind.GATHER) for _ in range(2))
    mine = two if comm.rank else one
    try:
        comm.all_gather(mine, (FlatSpan(0, 400),), label=mine.index + 1).wait()
    except MismatchError as error:
        return str(error)
    return "nothing was noticed"


def one_goes_on_after_an_error() -> str:
    """Have rank 0 raise, catch that and call another collective than its peer, which never came to the error."""
    comm = collectives("shm")
    comm.labels.update({1: "the gather of one", 2: "the gather of two"})
    one, two = (comm.allocate(400 * comm.world_size, BufferKind.GATHER) for _ in range(2))
    if comm.rank == 0:
        comm.abandon()
    mine = one if comm.rank else two
    with pytest.raises(ShardwiseError) as caught:
        comm.all_gather(mine, (FlatSpan(0, 400),), label=mine.index + 1).wait()
    return str(caught.value)


def another_collective(what: str) -> str:
    comm = collectives("shm")
    gather_buffer, reduce_buffer = (comm.allocate(2400, kind) for kind in BufferKind)
    flat = reduce_buffer.bytes.view(torch.float32)
    first = comm.rank == 0
    try:
        if what == "sizes":
            comm.all_reduce(torch.zeros(3 if first else 4))
        elif what == "dtypes":
            comm.all_reduce(torch.zeros(3, dtype=torch.int32 if first else torch.float32))
        elif what == "ops":
            comm.barrier() if first else comm.broadcast(torch.zeros(1), 0)
        elif what == "spans":
            comm.all_gather(gather_buffer, (FlatSpan(0, 10 if first else 20),)).wait()
        elif what == "reductions":
            part = flat[:100] if first else flat[100:200]
            comm.reduce_scatter(reduce_buffer, (Reduction(part, torch.empty(50), False),)).wait()
        else:
            comm.allocate(100 if first else 200, BufferKind.REDUCE)
    except MismatchError as error:
        return str(error)
    return "nothing was noticed"


def one_dies() -> None:
    comm = collectives("shm")
    gather_buffer, reduce_buffer = (comm.allocate(1200, kind) for kind in BufferKind)
    flat = reduce_buffer.bytes.view(torch.float32)
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    messages = []
    for call in (
        lambda: gather(comm, gather_buffer, 1).wait(),
        lambda: comm.reduce_scatter(reduce_buffer, (Reduction(flat, torch.empty(100), False),)).wait(),
        lambda: comm.all_reduce(torch.zeros(10)),
        lambda: comm.allocate(10, BufferKind.REDUCE),
    ):
        start = time.monotonic()
        # how it ended is known until its parent, which runs the tests, has been told
        with pytest.raises(CollectiveTimeout, match=r"the process of rank 1 (is gone|was killed by SIGKILL)") as caught:
            call()
        messages.append(str(caught.value))
        assert time.monotonic() - start < 2
    raise CollectiveTimeout(" & ".join(messages))


def too_late() -> None:
    os.environ["SHARDWISE_TIMEOUT_S"] = "0.3"
    try:
        comm = collectives("shm")
    finally:
        del os.environ["SHARDWISE_TIMEOUT_S"]
    if comm.rank == 0:
        time.sleep(1)
    comm.barrier()


def other_units() -> str:
    """Have two ranks wait for each other: each wants to write the buffer that the other one has not left."""
    os.environ["SHARDWISE_TIMEOUT_S"] = "1"
    try:
        comm = collectives("shm", poison=False)
    finally:
        del os.environ["SHARDWISE_TIMEOUT_S"]
    comm.labels.update({1: "the gather of vision", 2: "the gather of text"})
    vision, text = (comm.allocate(400 * comm.world_size, BufferKind.GATHER) for _ in range(2))
    for buffer in (vision, text):
        comm.all_gather(buffer, (FlatSpan(0, 400),), label=buffer.index + 1).wait()
    own = text if comm.rank else vision
    comm.release(own)
    with pytest.raises(CollectiveTimeout) as caught:
        comm.claim(own)
    return str(caught.value)


def inference_and_fill(nbytes: int) -> tuple[bool, int, int]:
    comm = collectives("shm")
    with torch.inference_mode():
        buffer = comm.allocate(nbytes, BufferKind.GATHER)
    return buffer.bytes.is_inference(), buffer.bytes.numel(), buffer.bytes.data_ptr() % 64


@pytest.mark.parametrize("world_size", [2, 3])
def test_replace_leaves_stashed_views_their_values(ranks: RankPools, world_size: int) -> None:
    ranks(world_size).run(views_of_replaced)
    ranks(world_size).run(replaced_reduce_buffer)


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_are_formed_as_soon_as_everybody_is_there(ranks: RankPools, world_size: int) -> None:
    """Not before, and without waiting: a rank that is ahead then finds the slot free when it wants it again."""
    total = world_size * (world_size + 1) / 2
    assert ranks(world_size).run(advanced) == [(-1, total)] * world_size


def test_sums_are_formed_in_the_order_of_their_reductions(ranks: RankPools) -> None:
    assert ranks(2).run(advanced_in_order) == [22, 22]


@pytest.mark.parametrize("world_size", [2, 3])
def test_released_memory_is_poisoned(ranks: RankPools, world_size: int) -> None:
    ranks(world_size).run(poison)


@pytest.fixture
def fresh() -> Iterator[RankPool]:
    """Ranks that have run no other test, whose leftover mappings would be counted here."""
    with RankPool(2) as pool:
        yield pool


def test_memory_and_descriptors_go_with_the_collectives(fresh: RankPool) -> None:
    assert fresh.run(nothing_left) == [([], []), ([], [])]


def test_no_segment_has_a_name(fresh: RankPool) -> None:
    """So a crash leaves nothing behind: what no process maps does not exist."""
    for lines in fresh.run(mapped):
        assert len(lines) >= 6
        assert all(line.endswith("/memfd:shardwise (deleted)") for line in lines)


def test_a_buffer_is_64_byte_aligned_and_no_inference_tensor(ranks: RankPools) -> None:
    for nbytes in (0, 1, 4097):
        assert ranks(2).run(inference_and_fill, nbytes) == [(False, nbytes, 0)] * 2


def test_ranks_that_wait_for_one_another_at_different_buffers_are_told_apart_at_once(ranks: RankPools) -> None:
    start = time.monotonic()
    messages = ranks(2).run(other_order)
    assert time.monotonic() - start < 20
    assert all("the gather of one" in message and "the gather of two" in message for message in messages), messages


def test_a_rank_that_goes_on_alone_after_an_error_is_named(ranks: RankPools) -> None:
    own, other = ranks(2).run(one_goes_on_after_an_error)
    assert own.startswith("rank 0 raised an error and went on, while rank 1 was at the gather of one. ")
    assert other.startswith("rank 0 raised an error instead of taking part in the gather of one, for which rank 1")


@pytest.mark.parametrize("what", ["sizes", "dtypes", "ops", "spans", "reductions", "allocate"])
def test_another_collective_is_noticed_by_all(ranks: RankPools, what: str) -> None:
    for rank, message in enumerate(ranks(2).run(another_collective, what)):
        assert f"rank {rank}" in message
        assert f"rank {1 - rank}" in message
        expected = {"ops": ("barrier", "broadcast"), "allocate": ("of different sizes", "sw.memory(model)")}
        assert all(words in message for words in expected.get(what, ("sizes or dtypes",)))


def test_a_dead_peer_is_named_at_once() -> None:
    """And whatever is waited for after that, too."""
    with RankPool(3) as pool, pytest.raises(CollectiveTimeout, match=r"(all_gather on rank \d: the process.*){4}"):
        pool.run(one_dies)


def test_ranks_that_call_other_units_are_told_where_both_were(ranks: RankPools) -> None:
    for rank, said in enumerate(ranks(2).run(other_units)):
        own = "text" if rank else "vision"
        assert said.startswith(f"claim of a buffer after the gather of {own} on rank {rank}: rank {1 - rank} did not")
        assert "calls other units than this rank, as where only some ranks' batches have images" in said
        assert f"that rank {rank} began is the gather of text, rank {1 - rank}'s is the gather of text" in said


def waits_for_a_child() -> str:
    """Have rank 0 take a child of its own, which exits, for the process of rank 1, which does not come."""
    comm = collectives("shm")
    if comm.rank == 0:
        child = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(3)"])
        comm._watch.births[1] = child.pid, birth(child.pid)
        with pytest.raises(CollectiveTimeout) as caught:
            comm.barrier()
        child.wait()
        return str(caught.value)
    return ""


def test_how_a_peer_ended_is_said_where_it_is_known(ranks: RankPools) -> None:
    said, _ = ranks(2).run(waits_for_a_child)
    assert said == "barrier on rank 0: the process of rank 1 exited with status 3."


def test_a_late_peer_is_named(ranks: RankPools) -> None:
    with pytest.raises(CollectiveTimeout, match=r"barrier on rank 1: rank 0 did not arrive within 0.3 s"):
        ranks(2).run(too_late)

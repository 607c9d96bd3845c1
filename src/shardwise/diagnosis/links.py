"""What is between ranks: right answers of the engine's collectives, bandwidth by pair, and the pace of each rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import device_tools
from shardwise.diagnosis.result import Checks, Finding
from shardwise.fsdp.collectives import Buffer, BufferKind, Collectives, FlatSpan, Reduction
from shardwise.tables import format_bytes
from shardwise.together import Together

_NUMEL = 4096
"""Elements of each rank's slice in a collective whose answer is checked."""
_BYTES = 8 * 2**20
_REPEATS = 5
_PRODUCTS = 40
"""Times that matrices are multiplied; the fastest counts, so that other processes of a busy machine do not."""
_SLOW = 3.0
"""How many times slower than others a rank or a link must be to be named."""
_SIDE = 384
"""Side of the matrices that are multiplied to find a rank's pace: a few milliseconds on a CPU."""
Pair = tuple[int, int]


def check_links(checks: Checks, collectives: Collectives, hosts: Sequence[str]) -> None:
    """Add the checks of collectives, of links and of each rank's pace. Every rank must call this.

    Args:
        collectives: of all ranks.
        hosts: each rank's host.
    """
    _check_pace(checks, collectives)
    if collectives.world_size == 1:
        checks.skip("collectives", "one rank has nobody to exchange with: start it with torchrun, or --ranks 2")
        return
    checks.conclude("collectives", _wrong_answers(collectives), "all-gather, reduce-scatter, all-reduce and broadcast")
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    members = firsts if len(firsts) > 1 else list(range(collectives.world_size))
    rates = _pair_rates(checks.ranks, collectives, members)
    what = "hosts" if len(firsts) > 1 else "ranks"
    slowest = min(rates, key=lambda pair: rates[pair])
    words = f"{format_bytes(rates[slowest])}/s between ranks {slowest[0]} and {slowest[1]}, the slowest of {len(rates)}"
    words = f"{words} pair(s) of {what}"
    checks.conclude("bandwidth", slow_links(rates), words, {f"{a}-{b}": rate for (a, b), rate in rates.items()})


def _wrong_answers(collectives: Collectives) -> Iterator[Finding]:
    """Yield what a collective answers wrongly on this rank. Values are small whole numbers, so sums are exact."""
    rank, size, device = collectives.rank, collectives.world_size, collectives.device
    pattern = torch.arange(_NUMEL * size, device=device).remainder(7).float()
    sums = pattern * sum(range(1, size + 1))
    mine = slice(rank * _NUMEL, (rank + 1) * _NUMEL)
    with _claimed(collectives, BufferKind.GATHER) as (buffer, view):
        view[mine] = pattern[mine] + rank
        collectives.all_gather(buffer, (FlatSpan(0, 4 * _NUMEL),)).wait()
        for source, (got, sent) in enumerate(zip(view.view(size, -1), pattern.view(size, -1), strict=True)):
            if not torch.equal(got, sent + source):
                yield _wrong("all-gather", rank, source)
        collectives.release(buffer)
    with _claimed(collectives, BufferKind.REDUCE) as (buffer, view):
        view.copy_(pattern * (rank + 1))
        out = torch.zeros(_NUMEL, device=device)
        collectives.reduce_scatter(buffer, (Reduction(view, out, accumulate=False),)).wait()
        if not torch.equal(out, sums[mine]):
            yield _wrong("reduce-scatter", rank)
    tensor = pattern * (rank + 1)
    collectives.all_reduce(tensor).wait()
    if not torch.equal(tensor, sums):
        yield _wrong("all-reduce", rank)
    for source in range(size):
        tensor = pattern + rank
        collectives.broadcast(tensor, source)
        if not torch.equal(tensor, pattern + source):
            yield _wrong("broadcast", rank, source)


@contextmanager
def _claimed(collectives: Collectives, kind: BufferKind) -> Iterator[tuple[Buffer, Tensor]]:
    """Give a claimed buffer with room for `_NUMEL` fp32 elements of each rank, and a view of these."""
    nbytes = 4 * _NUMEL * collectives.world_size
    buffer = collectives.allocate(nbytes, kind)
    collectives.claim(buffer)
    yield buffer, buffer.bytes[:nbytes].view(torch.float32)
    collectives.drop(buffer)


def _wrong(operation: str, rank: int, source: int | None = None) -> Finding:
    of = "" if source is None else f" of what rank {source} sent"
    words = f"rank {rank} got wrong numbers{of}: test its memory and links; leave its machine out until then"
    return Finding(operation, words)


def rounds(members: Sequence[int]) -> list[list[Pair]]:
    """Return every pair of members once, in rounds of which each has every member at most once."""
    circle: list[int | None] = [*members, *[None] * (len(members) % 2)]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def _pair_rates(ranks: Together, collectives: Collectives, members: Sequence[int]) -> dict[Pair, float]:
    """Return the bytes a second between each two members, there and back. Every rank must call this."""
    tensor = torch.zeros(_BYTES // 4, device=collectives.device)
    own = {}
    for pairs in rounds(members):
        for pair in pairs:
            if collectives.rank in pair:
                own[pair] = 2 * _BYTES / _trip_s(tensor, collectives.rank, pair)
        collectives.barrier()
    rates: dict[Pair, float] = {}
    for of_rank in ranks.all_gather_object(own):
        for pair, rate in of_rank.items():
            rates[pair] = min(rate, rates.get(pair, rate))
    return dict(sorted(rates.items()))


def _trip_s(tensor: Tensor, rank: int, pair: Pair) -> float:
    """Return the seconds of the fastest trip to the other rank of a pair and back. Both must call this."""
    times_s = []
    for _ in range(_REPEATS):
        device_tools.wait(tensor.device)
        start_s = time.perf_counter()
        if rank == pair[0]:
            dist.send(tensor, pair[1])
            dist.recv(tensor, pair[1])
        else:
            dist.recv(tensor, pair[0])
            dist.send(tensor, pair[0])
        device_tools.wait(tensor.device)
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


def slow_links(rates: Mapping[Pair, float]) -> Iterator[Finding]:
    """Yield a finding for each rank of which all links are slow, and for each other link that is.

    Args:
        rates: bytes a second by pair of ranks.
    """
    ordered = sorted(rates.values())
    usual = ordered[int(0.75 * (len(ordered) - 1) + 0.5)]  # one slow rank of four has half of the links
    slow = {pair for pair, rate in rates.items() if rate * _SLOW < usual}
    blamed: set[Pair] = set()
    for rank in sorted({rank for pair in slow for rank in pair}):
        own = {pair for pair in rates if rank in pair}
        if len(own) > 1 and own <= slow:
            blamed |= own
            best = format_bytes(max(rates[pair] for pair in own))
            words = f"none of its links has more than {best}/s, others have {format_bytes(usual)}/s"
            yield Finding(f"rank {rank}", f"{words}: look at its host's network, or leave it out")
    median = statistics.median(ordered)  # where few links are fast by design, as bridges of two, others are no fault
    for pair in sorted(pair for pair in slow - blamed if rates[pair] * _SLOW < median):
        words = f"{format_bytes(rates[pair])}/s, others have {format_bytes(usual)}/s: look at what connects them"
        yield Finding(f"ranks {pair[0]} and {pair[1]}", words, {"bytes_per_s": rates[pair]})


def _check_pace(checks: Checks, collectives: Collectives) -> None:
    x = torch.ones(_SIDE, _SIDE, device=collectives.device)
    times_s = []
    for _ in range(_PRODUCTS):
        device_tools.wait(x.device)
        start_s = time.perf_counter()
        torch.mm(x, x)
        device_tools.wait(x.device)
        times_s.append(time.perf_counter() - start_s)
    rates = [2 * _SIDE**3 / one for one in checks.ranks.all_gather_object(min(times_s))]
    words = f"{min(rates) / 1e9:,.1f} GFLOP/s in fp32 on the slowest rank, {max(rates) / 1e9:,.1f} on the fastest"
    numbers = {f"rank {rank}": rate for rank, rate in enumerate(rates)}
    checks.conclude("pace of ranks", slow_ranks(rates), words, numbers)


def slow_ranks(rates: Sequence[float]) -> Iterator[Finding]:
    """Yield a finding for each rank that computes far slower than the median of the others. `rates`: by rank."""
    for rank, rate in enumerate(rates):
        others = [*rates[:rank], *rates[rank + 1 :]]
        if others and rate * _SLOW < (median := statistics.median(others)):
            words = f"computes at {rate / median:.0%} of the others: look at its clocks, heat and other processes"
            yield Finding(f"rank {rank}", f"{words}; all ranks go at its pace", {"flops": rate})

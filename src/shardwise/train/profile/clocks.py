"""How far the ranks' clocks are from rank 0's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardwise.together import Together

_ROUNDS = 16


class Offset(NamedTuple):
    """What to add to a rank's clock to get rank 0's, in nanoseconds, and by how much that may be wrong."""

    offset_ns: int
    within_ns: int


def offsets(ranks: Together, clock: Callable[[], int] = time.time_ns) -> list[Offset]:
    """Compare the ranks' clocks, and return the offset of each, by rank. Every rank must call this.

    In a few exchanges each rank notes when it sends and when it has heard from all. What it hears, rank 0 had sent
    before, and what rank 0 hears, it had sent before: each exchange bounds the offset from both sides, by cause and
    effect alone, however long messages take. The narrowest bounds of all exchanges count.
    """
    stamps = []
    for _ in range(_ROUNDS):
        sent_ns = clock()
        ranks.exchange(b"", lambda left, right: b"")
        stamps.append((sent_ns, clock()))
    everybodys = ranks.all_gather_object(stamps)
    return [bounded(everybodys[0], own) for own in everybodys]


def bounded(first: Sequence[tuple[int, int]], own: Sequence[tuple[int, int]]) -> Offset:
    """Return the offset of a rank: from rank 0's times of sending and hearing in each exchange, and its own."""
    if first is own:
        return Offset(0, 0)
    least = max(sent - heard for (sent, _), (_, heard) in zip(first, own, strict=True))
    most = min(heard - sent for (_, heard), (sent, _) in zip(first, own, strict=True))
    return Offset((least + most) // 2, abs(most - least) // 2)

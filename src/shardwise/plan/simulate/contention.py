"""What is under way when a collective begins and while it runs: kernels that fill the device, others on its links.

Both are known only when the step has been put on streams, so it is put there again with what was found, until nothing
changes (`timeline.simulate`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

SAME_S = 1e-7
"""Times that differ by less are the same."""


class Busy(NamedTuple):
    """A kernel on the stream that computes."""

    start_s: float
    end_s: float
    wave_s: float
    """Between two moments at which it has given up all its processors; 0 where its blocks are short."""


class TimedCollective(NamedTuple):
    """A collective on its links."""

    number: int
    communicator: str
    links: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Contention:
    """What an earlier pass found."""

    kernels: Sequence[Busy] = ()
    """In order."""
    shared_s: Mapping[int, float] = field(default_factory=dict)
    """By collective: how much longer it takes beside others on its links."""

    def room_s(self, ready_s: float) -> float:
        """When a collective that could begin at `ready_s` finds processors. Its blocks have priority over those of the
        kernel that runs, which has none to give until a wave of its own is over."""
        position = bisect_right(self.kernels, ready_s, key=lambda kernel: kernel.start_s) - 1
        if position < 0:
            return ready_s
        kernel = self.kernels[position]
        if kernel.wave_s <= 0 or ready_s >= kernel.end_s:
            return ready_s
        waves = math.ceil((ready_s - kernel.start_s) / kernel.wave_s - SAME_S) or 1
        return max(ready_s, min(kernel.end_s, kernel.start_s + waves * kernel.wave_s))


def sharing(transfers: Sequence[TimedCollective]) -> dict[int, float]:
    """By collective: how much longer it takes beside those of other communicators on its links, each of which has an
    equal part of them while both run: as long as half of the time that they share."""
    found: dict[int, float] = {}
    under_way: list[TimedCollective] = []
    for one in sorted(transfers, key=lambda transfer: transfer.start_s):
        under_way = [other for other in under_way if other.end_s > one.start_s]
        for other in under_way:
            if other.communicator != one.communicator and other.links == one.links:
                shared_s = (min(one.end_s, other.end_s) - one.start_s) / 2
                for number in (one.number, other.number):
                    found[number] = found.get(number, 0.0) + shared_s
        under_way.append(one)
    return found

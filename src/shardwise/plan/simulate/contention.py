"""What delays a collective: a kernel that fills the device when it begins, and other collectives on its links.

Both are known only after a step was simulated, so it is simulated again with what was found, until nothing changes
(`simulation.simulate`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

SAME_S = 1e-7
"""Times that differ by less count as equal."""


class Busy(NamedTuple):
    """A kernel on the compute stream."""

    start_s: float
    end_s: float
    wave_s: float
    """Seconds between two moments at which the kernel has given up all its processors; 0 if its thread blocks are
    short."""


class TimedCollective(NamedTuple):
    """A collective on its links."""

    number: int
    communicator: str
    links: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Contention:
    """The contention that an earlier pass found."""

    kernels: Sequence[Busy] = ()
    """Kernels that fill the device, in order."""
    shared_s: Mapping[int, float] = field(default_factory=dict)
    """By number of a collective: how many seconds longer it takes because it shares its links."""

    def room_s(self, ready_s: float) -> float:
        """Return the time at which a collective that could begin at `ready_s` gets processors. Its thread blocks have
        priority over those of the running kernel, but that gives up no processor until a wave of its own is over."""
        position = bisect_right(self.kernels, ready_s, key=lambda kernel: kernel.start_s) - 1
        if position < 0:
            return ready_s
        kernel = self.kernels[position]
        if kernel.wave_s <= 0 or ready_s >= kernel.end_s:
            return ready_s
        waves = math.ceil((ready_s - kernel.start_s) / kernel.wave_s - SAME_S) or 1
        return max(ready_s, min(kernel.end_s, kernel.start_s + waves * kernel.wave_s))


def sharing(transfers: Sequence[TimedCollective]) -> dict[int, float]:
    """Return, by number of a collective, how much longer it takes because collectives of other communicators share its
    links. While two run at once each has half of the links, so each takes longer by half of the time that they
    overlap."""
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

"""A flat layout: parameters one after another in a 1-D buffer that is cut into equal slices, one a rank.

    | a ......... | b .... | gap | c ............................ | padding |
    | slice of rank 0        | slice of rank 1        | slice of rank 2    |

Each parameter starts on a multiple of `align` elements and so does each slice: NCCL and vector units are several
times slower off a 16-byte boundary. Slices may cut parameters anywhere, so no size has to be divisible by another
(the arrangement of FSDP1's flat parameter and of ZeRO-3: arXiv:2304.11277 section 3.2.1, arXiv:1910.02054).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

# Fragments ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fragment:
    """The intersection of one parameter with one rank's slice: elements [start, stop) of the flattened parameter `fqn`,
    at `offset` of the slice.

    Every rank has a fragment of every parameter; many are empty (start == stop).
    """

    fqn: str
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


# Flat layouts ---------------------------------------------------------------------------------------------------------


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter's place: elements [start, start + numel) of the flat buffer, row-major."""

    fqn: str
    shape: tuple[int, ...]
    start: int
    numel: int

    @property
    def stop(self) -> int:
        """start + numel."""
        return self.start + self.numel


@dataclass(frozen=True)
class FlatLayout:
    """Parameters in a buffer of `numel` elements (with padding), cut into `world_size` slices of `shard_numel`."""

    entries: tuple[Entry, ...]
    numel: int
    world_size: int

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's slice; the same for every rank."""
        return self.numel // self.world_size

    @cached_property
    def used_numel(self) -> int:
        """Elements that belong to parameters; the rest is padding."""
        return sum(entry.numel for entry in self.entries)

    def slice_of(self, rank: int) -> tuple[int, int]:
        """[start, stop) of `rank`'s slice, in elements of the flat buffer."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def fragment(self, index: int, rank: int) -> Fragment:
        """The elements of entry `index` that lie in the slice of `rank`."""
        entry = self.entries[index]
        low, high = self.slice_of(rank)
        start = min(max(low, entry.start), entry.stop)
        stop = min(max(high, entry.start), entry.stop)
        if start >= stop:
            return Fragment(entry.fqn, 0, 0, 0)
        return Fragment(entry.fqn, start - entry.start, stop - entry.start, start - low)

    def fragments(self, rank: int) -> tuple[Fragment, ...]:
        """`rank`'s fragment of every entry, in order; some are empty."""
        return tuple(self.fragment(index, rank) for index in range(len(self.entries)))


def build_layout(shapes: Iterable[tuple[str, tuple[int, ...]]], world_size: int, align: int) -> FlatLayout:
    """Lay (fqn, shape) pairs one after another.

    Args:
        shapes: names and global shapes, in the order of the buffer.
        world_size: number of slices, at least 1.
        align: in elements, at least 1; starts of entries and of slices are multiples of it.
    """
    if world_size < 1 or align < 1:
        raise ValueError(f"world_size and align must be at least 1, not {world_size} and {align}")
    entries: list[Entry] = []
    end = 0
    for fqn, shape in shapes:
        start = round_up(end, align)
        numel = math.prod(shape)
        entries.append(Entry(fqn, tuple(shape), start, numel))
        end = start + numel
    shard_numel = round_up(-(-end // world_size), align)
    return FlatLayout(tuple(entries), shard_numel * world_size, world_size)

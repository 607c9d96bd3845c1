"""Where the elements of one flattened tensor are stored in another: runs of consecutive elements that move together.

A rename is a single run. A tensor that is split, stacked, sliced or permuted on its way to a file is several, so that
one arithmetic serves them all. Imports numpy, no torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

MOST_RUNS = 2**20
"""Most runs in one map, 24 bytes each, if they are short: a large matrix that is transposed would have more, and no
byte ranges worth the name."""
LONG_RUN = 512
"""Elements of a long run. A map may have any number of those, such as interleaved rows of a stack of many experts."""


class Strided(NamedTuple):
    """Positions of a tensor's elements in a storage, as torch gives them; counted in elements."""

    start: int
    strides: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class IndexMap:
    """Element `here[i] + k` of one flattened tensor is element `there[i] + k` of another, for k < `length[i]`.

    Ordered by `here`. No element occurs twice on either side; neighbours that continue each other are one run.
    """

    here: Ints
    there: Ints
    length: Ints

    @classmethod
    def one(cls, numel: int, here: int = 0, there: int = 0) -> Self:
        """Return a map of a single run; of none if `numel` is 0."""
        starts = [(here, there, numel)] if numel else []
        return cls(*np.array(starts, dtype=np.int64).reshape(-1, 3).T)

    @classmethod
    def paired(cls, sizes: Sequence[int], here: Strided, there: Strided) -> Self:
        """Return the map between two tensors of the same sizes that have these strides in their storages.

        Raises ValueError if it would need more than MOST_RUNS runs and these are short, or if elements overlap.
        """
        dims = [dim for dim in zip(sizes, here.strides, there.strides, strict=True) if dim[0] != 1]
        if not math.prod(sizes):
            return cls.one(0)
        dims = _fewest(sorted(dims, key=lambda dim: -dim[1]))
        length = dims.pop()[0] if dims and dims[-1][1:] == (1, 1) else 1
        count = math.prod(size for size, _, _ in dims)
        if count > MOST_RUNS and length < LONG_RUN:
            raise ValueError(f"it would be cut into {count:,} pieces of {length} elements")
        starts = np.array([[here.start], [there.start]], dtype=np.int64)
        for size, *strides in dims:
            steps = np.arange(size, dtype=np.int64) * np.array(strides, dtype=np.int64)[:, None]
            starts = (starts[:, :, None] + steps[:, None, :]).reshape(2, -1)
        return cls._ordered(starts[0], starts[1], np.full(starts.shape[1], length, dtype=np.int64))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Join several maps between the same two tensors. Raises ValueError if they overlap."""
        return cls._ordered(*(np.concatenate([getattr(part, side) for part in parts]) for side in _SIDES))

    @classmethod
    def _ordered(cls, here: Ints, there: Ints, length: Ints) -> Self:
        if len(here) < 2:
            return cls(here, there, length)
        order = np.argsort(here, kind="stable")
        here, there, length = here[order], there[order], length[order]
        back = np.argsort(there, kind="stable")
        for starts, lengths in ((here, length), (there[back], length[back])):
            if (starts[1:] < (starts + lengths)[:-1]).any():
                raise ValueError("elements overlap")
        begins = np.ones(len(here), dtype=bool)
        begins[1:] = (here[1:] != (here + length)[:-1]) | (there[1:] != (there + length)[:-1])
        firsts = np.flatnonzero(begins)
        lengths = np.add.reduceat(length, firsts) if len(firsts) else length
        return cls(here[firsts], there[firsts], lengths)

    def __len__(self) -> int:
        return len(self.here)

    @property
    def numel(self) -> int:
        """Number of elements that are mapped."""
        return int(self.length.sum())

    def inverse(self) -> Self:
        """Return the map from there to here."""
        return self._ordered(self.there, self.here, self.length)

    def within(self, start: int, stop: int) -> Self:
        """Return the part whose elements here are in [start, stop)."""
        span = slice(np.searchsorted(self._stops, start, "right"), np.searchsorted(self.here, stop, "left"))
        low: Ints = np.maximum(self.here[span], start)
        high: Ints = np.minimum(self._stops[span], stop)
        return type(self)(low, self.there[span] + (low - self.here[span]), high - low)

    def moved(self, here: int = 0, there: int = 0) -> Self:
        """Return the same runs, with `here` and `there` added to the numbers of the elements."""
        return type(self)(self.here + here, self.there + there, self.length)

    def through(self, other: Self) -> Self:
        """Return the composition with `other`: from here, through there, to `other.there`. Elements that `other` does
        not map are left out."""
        first = np.searchsorted(other._stops, self.there, "right")
        count = np.maximum(0, np.searchsorted(other.here, self.there + self.length, "left") - first)
        own = np.repeat(np.arange(len(self)), count)
        theirs = np.arange(len(own)) - np.repeat(np.cumsum(count) - count, count) + first[own]
        low = np.maximum(self.there[own], other.here[theirs])
        high = np.minimum((self.there + self.length)[own], other._stops[theirs])
        here = self.here[own] + (low - self.there[own])
        there = other.there[theirs] + (low - other.here[theirs])
        keep = high > low
        return self._ordered(here[keep], there[keep], (high - low)[keep])

    def elements(self) -> Ints:
        """Return the number of each element there, in the order of here. int64."""
        ends = np.cumsum(self.length)
        return np.repeat(self.there - (ends - self.length), self.length) + np.arange(self.numel)

    def stretches(self, most: int, gap: int = 0) -> Iterator[Self]:
        """Yield, in order, parts that span at most `most` elements here, with gaps of at most `gap` in them."""
        breaks = np.flatnonzero(self.here[1:] - self._stops[:-1] > gap) + 1
        firsts, lasts = [0, *breaks.tolist()], [*(breaks - 1).tolist(), len(self) - 1]
        for first, last in zip(firsts, lasts, strict=True) if len(self) else ():
            start, stop = int(self.here[first]), int(self._stops[last])
            for low in range(start, stop, most):
                if len(part := self.within(low, min(low + most, stop))):
                    yield part

    def tuples(self) -> list[tuple[int, int, int]]:
        """Return (here, there, length) of each run."""
        return list(zip(self.here.tolist(), self.there.tolist(), self.length.tolist(), strict=True))

    @property
    def _stops(self) -> Ints:
        stops: Ints = self.here + self.length
        return stops


_SIDES = ("here", "there", "length")


def tile(parts: Sequence[IndexMap], numel: int) -> bool:
    """Return whether each of `numel` elements here is in exactly one of the maps, which may lead to several tensors."""
    here, length = (np.concatenate([getattr(part, side) for part in parts]) for side in ("here", "length"))
    order = np.argsort(here, kind="stable")
    ends = np.cumsum(length[order])
    return bool((here[order] == ends - length[order]).all()) and numel == (int(ends[-1]) if len(ends) else 0)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A stored tensor that holds elements of one of the model's: most often all of them, in order, under some name."""

    name: str
    shape: tuple[int, ...]
    """Shape of the stored tensor."""
    runs: IndexMap
    """From elements of the model's flattened tensor to elements of the stored one."""

    def renamed(self, name: str) -> Place:
        """Return the same place in a tensor of another name."""
        return self if name == self.name else Place(name, self.shape, self.runs)

    @staticmethod
    def whole(name: str, shape: Sequence[int]) -> Place:
        """Return the place of a tensor that is stored as it is. Repeated calls return the same object, while it is
        among the latest."""
        return _whole(name, tuple(shape))


@functools.lru_cache(maxsize=2**16)
def _whole(name: str, shape: tuple[int, ...]) -> Place:
    return Place(name, shape, IndexMap.one(math.prod(shape)))


def _fewest(dims: Sequence[tuple[int, int, int]]) -> list[tuple[Any, ...]]:
    """Return the dimensions (size, strides), outermost first, with those merged that are one dimension on both
    sides."""
    joined: list[tuple[int, int, int]] = []
    for size, *strides in dims:
        if joined and joined[-1][1:] == tuple(stride * size for stride in strides):
            size *= joined.pop()[0]  # noqa: PLW2901
        joined.append((size, strides[0], strides[1]))
    return joined

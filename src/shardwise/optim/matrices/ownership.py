"""Who owns which matrix: pure arithmetic, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Cost = Callable[[tuple[int, ...]], int]
"""Of a matrix's shape: what a step on it costs, in any unit."""


class OwnerRank(NamedTuple):
    """A rank by its position in its replicate group and in its shard group."""

    replica: int
    rank: int


def product_cost(shape: tuple[int, ...]) -> int:
    """Of an iteration of matrix products (Newton-Schulz, and what else factors a matrix): rows x columns x the
    lesser of the two."""
    return shape[0] * shape[1] * min(shape)


class Balance:
    """Gives matrices to ranks, unit by unit, so that after every unit no rank has been given more than the others by
    much: ranks work through the units in that order, and whoever is done with one goes on to the next."""

    def __init__(self, replicas: int, shards: int) -> None:
        self._shards = shards
        self._loads = [0] * (replicas * shards)
        self._dearest = 0

    def owners(self, costs: Sequence[int], held: Sequence[Sequence[int]]) -> list[OwnerRank]:
        """Owners for the matrices of the next unit: the dearest first, each to the least loaded rank (Graham's rule),
        or to who holds half of it or more already, so that less has to travel, as long as no load comes to exceed the
        mean by more than the dearest matrix so far.

        Args:
            costs: of each matrix.
            held: of each matrix, how many of its elements each rank of the shard group holds.
        """
        owners = [OwnerRank(0, 0)] * len(costs)
        for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
            chosen = self._choose(costs[index], held[index])
            self._loads[chosen] += costs[index]
            owners[index] = OwnerRank(*divmod(chosen, self._shards))
        return owners

    def _choose(self, cost: int, held: Sequence[int]) -> int:
        loads, ranks = self._loads, len(self._loads)
        self._dearest = max(self._dearest, cost)
        most = ranks * self._dearest + sum(loads) + cost  # times ranks, to stay among whole numbers
        near = [
            rank
            for rank, load in enumerate(loads)
            if 2 * held[rank % self._shards] >= sum(held) and ranks * (load + cost) <= most
        ]
        return min(near or range(ranks), key=lambda rank: (loads[rank], -held[rank % self._shards], rank))

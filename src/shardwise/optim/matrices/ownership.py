"""Who owns which matrix: pure arithmetic, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Cost = Callable[[tuple[int, ...]], int]
"""Cost, in any unit, of a step on a matrix of the given shape."""


class OwnerRank(NamedTuple):
    """A rank by its position in its replicate group, in its shard group, and on the tensor axis."""

    replica: int
    rank: int
    tensor: int | None = None
    """None: each rank of the tensor axis owns the matrix, which is not cut along it."""


def product_cost(shape: tuple[int, ...]) -> int:
    """Return the cost of iterated matrix products (Newton-Schulz and other factorizations): rows x columns x the lesser
    of the two."""
    return shape[0] * shape[1] * min(shape)


class Balance:
    """Assigns matrices to ranks unit by unit, so that loads are about equal after every unit and not only at the end:
    ranks work through the units in this order, and a rank that has finished one goes on to the next."""

    def __init__(self, replicas: int, shards: int) -> None:
        self._shards = shards
        self._loads = [0] * (replicas * shards)
        self._dearest = 0

    def owners(self, costs: Sequence[int], held: Sequence[Sequence[int]]) -> list[OwnerRank]:
        """Assign owners to the matrices of the next unit, the most expensive first.

        Each goes to the least loaded rank (Graham's rule), or, so that less has to travel, to a rank that already holds
        at least half of it, as long as that rank's load does not exceed the mean by more than the most expensive matrix
        so far.

        Args:
            costs: cost of each matrix.
            held: for each matrix, how many of its elements each rank of the shard group holds.

        Returns:
            The owners, in the order of `costs`.
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
        most = ranks * self._dearest + sum(loads) + cost  # times `ranks`, so that all are integers
        near = [
            rank
            for rank, load in enumerate(loads)
            if 2 * held[rank % self._shards] >= sum(held) and ranks * (load + cost) <= most
        ]
        return min(near or range(ranks), key=lambda rank: (loads[rank], -held[rank % self._shards], rank))

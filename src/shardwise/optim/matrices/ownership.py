"""Who owns which matrix: pure arithmetic, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Cost = Callable[[tuple[int, ...]], int]
"""Of a matrix's shape: what a step on it costs, in any unit."""


class Owner(NamedTuple):
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

    def owners(self, costs: Sequence[int], held: Sequence[Sequence[int]]) -> list[Owner]:
        """Owners for the matrices of the next unit.

        The dearest matrix first goes to the least loaded rank (Graham's rule, at most 4/3 of the best possible), or to
        another that may have it without the highest load growing beyond that: the one that holds most of the matrix
        already, which then need not travel.

        Args:
            costs: of each matrix.
            held: of each matrix, how many of its elements each rank of the shard group holds.
        """
        owners = [Owner(0, 0)] * len(costs)
        for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
            cost, loads = costs[index], self._loads
            limit = max(*loads, min(loads) + cost)
            fitting = [rank for rank, load in enumerate(loads) if load + cost <= limit]
            chosen = min(fitting, key=lambda rank: (-held[index][rank % self._shards], loads[rank], rank))
            loads[chosen] += cost
            owners[index] = Owner(*divmod(chosen, self._shards))
        return owners

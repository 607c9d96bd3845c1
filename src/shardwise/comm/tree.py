"""The tree along which hosts exchange messages: every rank's parent and children."""

from __future__ import annotations

CHILDREN = 8
"""Of a rank, at most: four levels for 4,000 ranks."""


def parent_of(rank: int) -> int:
    """The rank that a rank reports to. Of rank 0, which has none, a negative number."""
    return (rank - 1) // CHILDREN


def children_of(rank: int, world_size: int) -> range:
    """The ranks that report to a rank."""
    return range(CHILDREN * rank + 1, min(CHILDREN * (rank + 1) + 1, world_size))


def levels(ranks: int) -> int:
    """How many messages one after the other it takes from the last rank to rank 0."""
    count, rank = 0, ranks - 1
    while rank > 0:
        rank = parent_of(rank)
        count += 1
    return count

"""The tree along which hosts exchange messages: every rank's parent and children. The planner uses it without torch."""

from __future__ import annotations

CHILDREN = 8
"""Greatest number of children of a rank: four levels for 4,000 ranks."""


def parent_of(rank: int) -> int:
    """Return the rank that a rank reports to; a negative number for rank 0, which has no parent."""
    return (rank - 1) // CHILDREN


def children_of(rank: int, world_size: int) -> range:
    """Return the ranks that report to a rank."""
    return range(CHILDREN * rank + 1, min(CHILDREN * (rank + 1) + 1, world_size))


def levels(ranks: int) -> int:
    """Return the number of consecutive messages from the last rank to rank 0."""
    count, rank = 0, ranks - 1
    while rank > 0:
        rank = parent_of(rank)
        count += 1
    return count

"""Size classes: which units share slots, and how large these slots are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from shardwise.layout.flat import round_up

T = TypeVar("T")

SLOT_ALIGN_BYTES = 64
"""Regions inside a slot start on this boundary: a cache line, and enough for every collective."""

SAME_CLASS = 0.8
"""A unit joins a size class when it fills at least this share of its slots."""


@dataclass(frozen=True, slots=True)
class SizeClass(Generic[T]):
    """Units that share slots, in order, and how many slots they share."""

    members: tuple[T, ...]
    slot_bytes: int
    slot_count: int

    @property
    def total_bytes(self) -> int:
        return self.slot_bytes * self.slot_count


def size_classes(sizes: Sequence[tuple[T, int]], slots: Callable[[Sequence[T]], int]) -> list[SizeClass[T]]:
    """Group (unit, bytes) pairs, given in forward order, into size classes.

    Args:
        sizes: units of 0 bytes are left out.
        slots: how many slots a class of the given units should have; it gets no more than it has units.
    """
    open_classes: list[tuple[int, list[tuple[int, T]]]] = []
    for order, (unit, nbytes) in sorted(enumerate(sizes), key=lambda item: (-item[1][1], item[0])):
        if nbytes == 0:
            continue
        if open_classes and nbytes >= SAME_CLASS * open_classes[-1][0]:
            open_classes[-1][1].append((order, unit))
        else:
            open_classes.append((nbytes, [(order, unit)]))
    classes = []
    for nbytes, members in open_classes:
        units = tuple(unit for _, unit in sorted(members, key=lambda member: member[0]))
        classes.append(SizeClass(units, round_up(nbytes, SLOT_ALIGN_BYTES), min(slots(units), len(units))))
    return classes

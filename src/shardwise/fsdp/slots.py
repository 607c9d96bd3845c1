"""The arena: memory for gathered parameters and for gradients on their way, allocated once.

Units of about the same size share a *size class* with a fixed number of *slots*. Unit i of a class prefers slot
i mod K, so a steady order of units meets the same addresses at every step, and the number of slots is the limit on
how many units are gathered at once: nothing is allocated or freed after the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from shardwise.fsdp.collectives import Buffer, BufferKind, Collectives
from shardwise.fsdp.layout import round_up

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


def storage_key(tensor: Tensor) -> int:
    """Identity of a tensor's storage. Not its address: fake tensors have none."""
    key: int = tensor.untyped_storage()._cdata
    return key


class Slot(Generic[T]):
    """One buffer, free or held by one unit.

    Only `take` gives it a holder, and only when it has none; only `free` ends that. So two units are never in one slot.
    """

    __slots__ = ("_expected_references", "_flats", "buffer", "collectives", "generation", "holder", "key")

    def __init__(self, collectives: Collectives, buffer: Buffer, holder: T | None = None) -> None:
        """`holder`: holds the slot for good."""
        self.collectives = collectives
        self.holder = holder
        self.generation = 0
        """Counts replacements of the storage: views cached for another generation are void."""
        self._expected_references = 0
        self._set(buffer)

    def take(self, holder: T) -> None:
        """Give the free slot a holder. Waits until no rank reads from the buffer any more."""
        assert self.holder is None, "the slot has a holder already"
        self.holder = holder
        self.collectives.claim(self.buffer)

    def free(self) -> None:
        """Take the slot from its holder, which no longer uses it."""
        self.holder = None

    def _set(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.key = storage_key(buffer.bytes)
        self._flats: dict[torch.dtype | tuple[torch.dtype, int, int], Tensor] = {}
        """Views by dtype, first byte and elements, or by dtype alone; cached, as slicing costs more than a lookup."""

    def base(self, dtype: torch.dtype) -> Tensor:
        """Return the whole slot as a 1-D view of `dtype`."""
        base = self._flats.get(dtype)
        if base is None:
            base = self._flats[dtype] = self._cut(0, self.buffer.bytes.numel() // dtype.itemsize, dtype)
        return base

    def flat(self, start_bytes: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D view of `numel` elements of `dtype` from byte `start_bytes` on."""
        flat = self._flats.get((dtype, start_bytes, numel))
        if flat is None:
            flat = self._flats[dtype, start_bytes, numel] = self._cut(start_bytes, numel, dtype)
        return flat

    def _cut(self, start_bytes: int, numel: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # views are cached, and inference tensors cannot be saved for backward
            return self.buffer.bytes[start_bytes : start_bytes + numel * dtype.itemsize].view(dtype)

    def expect_references(self) -> None:
        """Take all tensors that refer to the storage now for the holder's own."""
        self._expected_references = self._references()

    @property
    def is_referenced(self) -> bool:
        """Whether anyone besides the holder keeps a view of the storage."""
        return self._references() > self._expected_references

    def _references(self) -> int:
        """Return how many tensors (not Python names) refer to the storage, views cached here not counted."""
        count: int = torch._C._storage_Use_Count(self.key)
        return count - len(self._flats)

    def retire_storage(self) -> None:
        """Leave the storage to those who still hold views of it and go on with another."""
        self._set(self.collectives.replace(self.buffer))
        self.generation += 1


class Arena(Generic[T]):
    """All slots of one kind."""

    def __init__(self, kind: BufferKind) -> None:
        self.kind = kind
        self.slots: list[Slot[T]] = []
        self._choices: dict[int, tuple[Slot[T], ...]] = {}

    def allocate(self, collectives: Collectives, classes: Sequence[SizeClass[T]]) -> None:
        """Allocate the slots of units on one group of ranks, all of which must call this with equal classes."""
        for size_class in classes:
            slots = tuple(
                Slot[T](collectives, collectives.allocate(size_class.slot_bytes, self.kind))
                for _ in range(size_class.slot_count)
            )
            self.slots.extend(slots)
            for position, unit in enumerate(size_class.members):
                first = position % len(slots)
                self._choices[id(unit)] = slots[first:] + slots[:first]

    def choices(self, unit: T) -> tuple[Slot[T], ...]:
        """Return the slots that may hold `unit`, the preferred one first; depends on the unit alone."""
        return self._choices[id(unit)]

    def preferred(self, unit: T) -> Slot[T]:
        """Return the slot that `unit` takes when the order of units is steady."""
        return self._choices[id(unit)][0]

"""The slices of weights or gradients on a tier, and the ring of buffers that they are read into and written from."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from torch import Tensor

from shardwise.errors import UsageError
from shardwise.offload.tiers.tier import Tier
from shardwise.sharded.extensions.offloaded import Slice, slices_of

BUFFERS = 4
"""Buffers of the ring, each as large as the largest slice: one is in use, others are read ahead and written back."""


class Holder(Protocol):
    """A slice with a buffer, as `ShardStore` sees it (`OffloadedSlice`)."""

    @property
    def is_being_read(self) -> bool:
        """Whether the slice is being read into its buffer."""

    @property
    def is_being_written(self) -> bool:
        """Whether the slice is being written back to the tier."""

    @property
    def is_written(self) -> bool:
        """Whether that write has finished, so that `finish` frees the buffer without waiting."""

    def let_go(self) -> None:
        """Give the buffer back, now or once it is written. Does nothing while anybody holds a view of it."""

    def finish(self) -> None:
        """Wait for a read or write under way, then give the buffer back."""


class ShardStore:
    """The slices of weights, or of gradients, of all units that one `sw.shard` call made, and of their deep copies.

    Does not communicate.
    """

    def __init__(self, tier: Tier, host_computes: bool = False) -> None:
        self.tier = tier
        self.host_computes = host_computes
        """Whether the host takes the optimizer's step, and so other operations that write many tensors too."""
        self._placed_bytes = 0
        self._vacant: defaultdict[int, list[int]] = defaultdict(list)
        """By size in bytes: the first bytes of places whose slices were freed."""
        self._slices = 0
        """How many slices have a place."""
        self._buffer_bytes = 0
        self._free: deque[Tensor] = deque()
        """Free buffers. The one given back first is taken first: its last copy is the likeliest to have finished."""
        self._made = self._made_bytes = 0
        """Number and bytes of all buffers, free or not. More than `BUFFERS` while users keep views of many slices."""
        self._held: dict[Holder, None] = {}
        """Slices that have a buffer, in the order in which they took it."""

    @property
    def ring_bytes(self) -> int:
        """Bytes of all buffers, in the memory of the computing device."""
        return self._made_bytes

    def place(self, nbytes: int) -> int:
        """Return the first byte of a place for a new slice, without allocating it yet.

        A freed place of the same size is reused; the slices of a model's deep copies have the same sizes.
        """
        self._slices += 1
        if self._vacant[nbytes]:
            return self._vacant[nbytes].pop()
        start = self._placed_bytes
        self._placed_bytes += nbytes
        if nbytes > self._buffer_bytes:  # perhaps of parameters frozen until now, while the ring was in use
            self._buffer_bytes = nbytes
            self._drop_free()
        return start

    def vacate(self, start: int, nbytes: int) -> None:
        """Free the place of a slice that was collected. It was at rest: `_held` keeps slices with a buffer alive."""
        self._vacant[nbytes].append(start)
        self._slices -= 1

    def allocate(self) -> None:
        """Allocate space on the tier for all slices that have a place. Raises UsageError if there is none."""
        self.tier.grow(self._placed_bytes)

    # Buffers ----------------------------------------------------------------------------------------------------------

    def take_buffer(self) -> Tensor:
        """Return a buffer for a slice, waiting for one if necessary.

        Waits for the oldest write first; without writes, the slice read ahead last gives up its buffer. If views of all
        buffers are held, allocates one more. Raises UsageError if the tier has no space or has failed.
        """
        while (buffer := self.take_free_buffer()) is None:
            writing = [each for each in self._held if each.is_being_written]
            reading = [each for each in self._held if each.is_being_read]
            if not writing and not reading:
                return self._new_buffer()
            (writing[0] if writing else reading[-1]).finish()
        return buffer

    def take_free_buffer(self) -> Tensor | None:
        """Return a buffer that is free without waiting, or None. Raises as `take_buffer`."""
        self.allocate()  # for slices of a model's copies
        for each in [each for each in self._held if each.is_written]:
            each.finish()
        if self._made < min(BUFFERS, self._slices):
            return self._new_buffer()
        return self._free.popleft() if self._free else None

    def _new_buffer(self) -> Tensor:
        buffer = self.tier.buffer(self._buffer_bytes)
        self._made += 1
        self._made_bytes += buffer.nbytes
        return buffer

    def _drop(self, buffer: Tensor) -> None:
        self._made -= 1
        self._made_bytes -= buffer.nbytes
        self.tier.drop(buffer)

    def _drop_free(self) -> None:
        while self._free:
            self._drop(self._free.pop())

    def hold(self, held: Holder) -> None:
        """Note that a slice has taken a buffer."""
        self._held[held] = None

    def give_back(self, held: Holder, buffer: Tensor) -> None:
        """Take a buffer back from a slice."""
        del self._held[held]
        if self._made > BUFFERS or buffer.nbytes < self._buffer_bytes:
            self._drop(buffer)
        else:
            self._free.append(buffer)

    def make_way(self) -> None:
        """Let go of all slices that are in a buffer and that nobody holds a view of."""
        for each in list(self._held):
            each.let_go()

    def finish(self) -> None:
        """Wait until everything that was written to slices is on the tier. Raises UsageError if that fails."""
        self.make_way()
        for each in list(self._held):
            each.finish()

    def notice_failures(self) -> None:
        """Wait for transfers under way, so that the tier knows of their errors. Does not raise them."""
        for each in list(self._held):
            with suppress(UsageError):
                each.finish()

    def release(self) -> None:
        """Write everything back and free the ring until its next use. Raises UsageError if a transfer fails."""
        self.finish()
        self._drop_free()


def slices_for_step(parameter: Tensor) -> tuple[Slice, ...]:
    """Return the slices that the parameter's step loads: its own and its gradient's, if they are offloaded."""
    return slices_of((parameter, parameter.grad))


def have_read_ahead(parameters: Iterable[Tensor]) -> None:
    """Read ahead the slices that the steps of these parameters need, in this order."""
    for parameter in parameters:
        for each in slices_for_step(parameter):
            each.read_ahead()

"""Slices of weights or gradients that rest on a medium, and the ring of buffers through which they come and go."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from torch import Tensor

from shardwise.errors import UsageError
from shardwise.offload.medium import Medium
from shardwise.sharded.parameter import Home, ShardedParameter

BUFFERS = 4
"""Of the ring, each as large as the largest slice: one is worked on, the others are read ahead and written back."""


class Holder(Protocol):
    """A slice that has a buffer (`SliceHome`)."""

    @property
    def is_being_read(self) -> bool:
        """Whether it is on its way to the buffer."""

    @property
    def is_being_written(self) -> bool:
        """Whether it is on its way back to the medium."""

    @property
    def is_written(self) -> bool:
        """Whether that write is over, and the buffer can be had."""

    def let_go(self) -> None:
        """Give the buffer back, now or when it is written; not while anybody has a view of it."""

    def finish(self) -> None:
        """Wait for a read or write under way, and give the buffer back."""


class ShardStore:
    """Of the units that one call of `sw.shard` made, and of copies of them. No communication."""

    def __init__(self, medium: Medium) -> None:
        self.medium = medium
        self._placed_bytes = 0
        self._vacant: defaultdict[int, list[int]] = defaultdict(list)
        """By size, first bytes of places whose slices are gone."""
        self._slices = 0
        """That there are."""
        self._buffer_bytes = 0
        self._free: deque[Tensor] = deque()
        """The one that was given back first is taken first: its last copy is the likeliest to be over."""
        self._made = self._made_bytes = 0
        """Buffers that there are, free or not. More than the ring's while users keep views of many slices."""
        self._held: dict[Holder, None] = {}
        """Slices that have a buffer, the one that took its last first."""

    @property
    def ring_bytes(self) -> int:
        """Memory that is held where buffers are."""
        return self._made_bytes

    def place(self, nbytes: int) -> int:
        """Where the next slice lies, once there is room. Slices of a model's copies are as large."""
        self._slices += 1
        if self._vacant[nbytes]:
            return self._vacant[nbytes].pop()
        start = self._placed_bytes
        self._placed_bytes += nbytes
        if nbytes > self._buffer_bytes:  # of parameters that were frozen, perhaps, while others came and went
            self._buffer_bytes = nbytes
            self._drop_free()
        return start

    def vacate(self, start: int, nbytes: int) -> None:
        """The slice there is gone. It was at rest: those that have a buffer are held."""
        self._vacant[nbytes].append(start)
        self._slices -= 1

    def take_room(self) -> None:
        """For all slices that were placed. Raises UsageError where the medium has none."""
        self.medium.grow(self._placed_bytes)

    # Buffers ----------------------------------------------------------------------------------------------------------

    def take_buffer(self) -> Tensor:
        """A buffer, which may have to be waited for: after the writes, what was read ahead too soon gives up its own.
        Where views are kept of all, one more. Raises UsageError where the medium has no room, or failed."""
        while (buffer := self.take_free_buffer()) is None:
            writing = [home for home in self._held if home.is_being_written]
            reading = [home for home in self._held if home.is_being_read]
            if not writing and not reading:
                return self._new_buffer()
            (writing[0] if writing else reading[-1]).finish()
        return buffer

    def take_free_buffer(self) -> Tensor | None:
        """One that need not be waited for, if there is one. Raises as `take_buffer`."""
        self.take_room()  # of copies
        for home in [home for home in self._held if home.is_written]:
            home.finish()
        if self._made < min(BUFFERS, self._slices):
            return self._new_buffer()
        return self._free.popleft() if self._free else None

    def _new_buffer(self) -> Tensor:
        buffer = self.medium.buffer(self._buffer_bytes)
        self._made += 1
        self._made_bytes += buffer.nbytes
        return buffer

    def _drop(self, buffer: Tensor) -> None:
        self._made -= 1
        self._made_bytes -= buffer.nbytes
        self.medium.drop(buffer)

    def _drop_free(self) -> None:
        while self._free:
            self._drop(self._free.pop())

    def hold(self, home: Holder) -> None:
        """A slice has taken a buffer."""
        self._held[home] = None

    def give_back(self, home: Holder, buffer: Tensor) -> None:
        """A slice gives it back."""
        del self._held[home]
        if self._made > BUFFERS or buffer.nbytes < self._buffer_bytes:
            self._drop(buffer)
        else:
            self._free.append(buffer)

    def make_way(self) -> None:
        """Have all slices go that are here and that nobody has a view of."""
        for home in list(self._held):
            home.let_go()

    def finish(self) -> None:
        """Have everything on the medium that was written. Raises UsageError."""
        self.make_way()
        for home in list(self._held):
            home.finish()

    def notice_failures(self) -> None:
        """Have errors known of what is under way, without raising them."""
        for home in list(self._held):
            with suppress(UsageError):
                home.finish()

    def release(self) -> None:
        """Give back the memory of the ring until the next use. Raises UsageError."""
        self.finish()
        self._drop_free()


def homes_for_step(parameter: Tensor) -> tuple[Home, ...]:
    """Of the slices that its step needs and that rest on a medium: its own, and its gradient's."""
    return tuple(
        tensor.home
        for tensor in (parameter, parameter.grad)
        if isinstance(tensor, ShardedParameter) and tensor.home is not None
    )


def have_read_ahead(parameters: Iterable[Tensor]) -> None:
    """The slices that their step needs are wanted soon, in this order."""
    for parameter in parameters:
        for home in homes_for_step(parameter):
            home.read_ahead()

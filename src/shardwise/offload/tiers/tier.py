"""The protocol of a tier: the host memory or disk on which slices and optimizer state rest between uses."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class Transfer(Protocol):
    """One read or write between a buffer and the tier."""

    @property
    def is_over(self) -> bool:
        """Whether the transfer has finished, so that `wait` returns at once. `wait` may return before this is true."""

    def wait(self) -> None:
        """Wait until the buffer can be used or reused. Where the device works on streams this may return earlier:
        `Tier.use` and later calls put the work on streams in order. Raises UsageError if the transfer is known to
        have failed."""


class Tier(Protocol):
    """Storage whose whole pages are read into *buffers* in the memory of the computing device, and written back.

    Does not communicate; errors are UsageErrors. Where the device works on streams, `read` and `write` are enqueued
    behind all earlier work on the same buffer or the same place. Callers must call `use` or `claim` before they use a
    buffer.
    """

    @property
    def nbytes(self) -> int:
        """Bytes allocated on the tier."""

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that it takes besides the callers' buffers: what is stored there, and stages."""

    @property
    def disk_bytes(self) -> int:
        """Bytes that it takes on disk."""

    @property
    def where(self) -> str:
        """The tier in words, for error messages."""

    def grow(self, nbytes: int) -> None:
        """Extend the tier to `nbytes` in all. What is stored already keeps its place."""

    def buffer(self, nbytes: int) -> Tensor:
        """Return a new buffer: 1-D uint8, page-aligned, whole pages."""

    def read(self, start: int, buffer: Tensor) -> Transfer:
        """Begin to fill a buffer, or the first part of one, from byte `start` of the tier."""

    def write(self, start: int, buffer: Tensor) -> Transfer:
        """Begin to write a buffer, or the first part of one, to byte `start` of the tier."""

    def use(self, buffer: Tensor) -> None:
        """Announce that the current stream will use the contents of a buffer. Its read must have been waited for."""

    def claim(self, buffer: Tensor) -> None:
        """Announce that the current stream will overwrite all of a buffer."""

    def drop(self, buffer: Tensor) -> None:
        """Stop using a buffer: its memory is freed with the last reference to it."""

    def read_into(self, start: int, piece: Tensor) -> None:
        """Fill any plain 1-D tensor from byte `start` on. Afterwards the current stream may read the tensor."""

    def write_from(self, start: int, piece: Tensor) -> None:
        """Write any plain 1-D tensor from byte `start` on. It is on the tier only after `settle`."""

    def settle(self) -> None:
        """Bring everything that `write_from` wrote onto the tier."""

    def in_host_memory(self, start: int, nbytes: int) -> Tensor | None:
        """Return the tier's own memory from byte `start` on, 1-D uint8, once nothing is copied to or from it, so that
        the host may read and write it. Waits for the device. None if the tier is not host memory."""

    def check(self) -> None:
        """Raise UsageError if an earlier read or write is known to have failed."""

    @property
    def has_failed(self) -> bool:
        """Whether `check` raises, or would raise once all transfers under way have finished."""

    def written_anew(self) -> AbstractContextManager[None]:
        """Return a context in which the caller writes everything still needed: if it succeeds, an earlier error is
        forgotten."""

"""What slices of weights and an optimizer's state rest on between uses: the host's memory, or a disk."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class Transfer(Protocol):
    """Bytes on their way between a buffer and the medium."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do. `wait` returns at once then, and may before."""

    def wait(self) -> None:
        """Until the buffer can be used, or used for something else; on streams, in the order that `use` and what
        follows make. Raises UsageError where it failed, as far as that is known."""


class Medium(Protocol):
    """Whole pages at places in it are read into *buffers*, where the device that computes has its memory, and written
    back from there. No communication; errors are UsageErrors.

    Where the device works on streams, `read` and `write` are enqueued, in order with all that was to use the same
    buffer or the same place. Whoever uses a buffer says so before: `use`, or `claim`.
    """

    @property
    def nbytes(self) -> int:
        """Room that was taken."""

    @property
    def where(self) -> str:
        """For errors."""

    def grow(self, nbytes: int) -> None:
        """Have room for so many bytes in all. What was placed before stays where it is."""

    def buffer(self, nbytes: int) -> Tensor:
        """A new buffer: 1-D uint8, whole pages from a page's first byte on."""

    def read(self, start: int, buffer: Tensor) -> Transfer:
        """Begin to fill a buffer, or the first part of one, from byte `start`."""

    def write(self, start: int, buffer: Tensor) -> Transfer:
        """Begin to write it there."""

    def use(self, buffer: Tensor) -> None:
        """The current stream is going to use what a buffer holds, whose read was waited for."""

    def claim(self, buffer: Tensor) -> None:
        """The current stream is going to write all of a buffer anew."""

    def drop(self, buffer: Tensor) -> None:
        """A buffer is not used any more: its memory goes with the last reference."""

    def read_into(self, start: int, piece: Tensor) -> None:
        """Fill any plain 1-D tensor from byte `start` on. The current stream may read it then."""

    def write_from(self, start: int, piece: Tensor) -> None:
        """Likewise write; there after `settle`."""

    def settle(self) -> None:
        """Have everything there that `write_from` wrote."""

    def check(self) -> None:
        """Raise UsageError if something could not be read or written before, as far as that is known."""

    @property
    def has_failed(self) -> bool:
        """Whether `check` raises, or would when all that is under way is over."""

    def written_anew(self) -> AbstractContextManager[None]:
        """Inside, all that is of use is written: if that succeeds, an error of before is forgotten."""

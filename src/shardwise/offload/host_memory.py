"""Memory of the host that a device copies from and to by itself, beside what it computes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from shardwise import accelerators
from shardwise.errors import UsageError
from shardwise.files.direct import huge_page_buffer
from shardwise.offload.device_buffers import DeviceBuffers, follow
from shardwise.offload.pinned import Pinned


class HostMemory:
    """A `Medium` on streams of its own, one for each direction: links work both ways at once.

    What orders memory is events: those of its buffers, and of the last write and the last read at each place. A
    transfer is over for the host at once.
    """

    is_over = True

    def __init__(self, device: torch.device, what: str, pin: bool = True) -> None:
        """`what`: is kept in it, for errors. `pin`: lock its pages, so that copies go beside what the host does."""
        self.nbytes = 0
        self._device = device
        self._what = what
        self._pin = pin
        self._segments: list[Pinned] = []
        self._starts: list[int] = []
        self._inward = accelerators.new_stream(device)
        self._outward = accelerators.new_stream(device)
        self._buffers = DeviceBuffers(device)
        self._written: dict[int, torch.Event] = {}
        """By place: the end of the last write."""
        self._read: dict[int, torch.Event] = {}
        """Likewise of the last read since then, which may have been to another buffer."""

    @property
    def where(self) -> str:
        """For errors."""
        return "in host memory"

    # Room -------------------------------------------------------------------------------------------------------------

    def grow(self, nbytes: int) -> None:
        """See `Medium`."""
        more = nbytes - self.nbytes
        if more <= 0:
            return
        try:
            memory = torch.frombuffer(huge_page_buffer(more), dtype=torch.uint8)
        except OSError as error:
            raise UsageError(
                f"offload: the host has no room for {more} bytes of this rank's {self._what} ({error})"
            ) from error
        self._segments.append(Pinned(memory, self._device, self._what, self._pin))
        self._starts.append(self.nbytes)
        self.nbytes = nbytes

    def _pairs(self, start: int, piece: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Memory from byte `start` on as long as a piece is, segment by segment, each with that part of the piece."""
        done = 0
        while done < piece.numel():
            index = bisect_right(self._starts, start + done) - 1
            offset = start + done - self._starts[index]
            memory = self._segments[index].memory[offset : offset + piece.numel() - done]
            yield memory, piece[done : done + memory.numel()]
            done += memory.numel()

    # Buffers ----------------------------------------------------------------------------------------------------------

    def buffer(self, nbytes: int) -> Tensor:
        """See `Medium`."""
        return self._buffers.new(nbytes)

    def read(self, start: int, buffer: Tensor) -> HostMemory:
        """See `Medium`."""
        follow(self._inward, self._buffers.before(buffer))
        if start in self._written:
            self._inward.wait_event(self._written[start])
        with accelerators.on(self._inward):
            for memory, part in self._pairs(start, buffer.data):  # no write, as versions go
                part.copy_(memory, non_blocking=True)
        self._read[start] = self._buffers.copied(buffer, self._inward)
        return self

    def write(self, start: int, buffer: Tensor) -> HostMemory:
        """See `Medium`."""
        follow(self._outward, self._buffers.before(buffer))
        if start in self._read:
            self._outward.wait_event(self._read.pop(start))
        with accelerators.on(self._outward):
            for memory, part in self._pairs(start, buffer.data):
                memory.copy_(part, non_blocking=True)
        self._written[start] = self._buffers.copied(buffer, self._outward)
        return self

    def wait(self) -> None:
        """As a `Transfer`: who uses the buffer is on a stream, which waits in `use`."""

    def use(self, buffer: Tensor) -> None:
        """See `Medium`."""
        self._buffers.use(buffer)

    def claim(self, buffer: Tensor) -> None:
        """See `Medium`."""
        self._buffers.claim(buffer)

    def drop(self, buffer: Tensor) -> None:
        """See `Medium`."""
        self._buffers.drop(buffer)

    def _current(self) -> torch.Stream:
        return accelerators.current_stream(self._device)

    # Beside the buffers -----------------------------------------------------------------------------------------------

    def read_into(self, start: int, piece: Tensor) -> None:
        """See `Medium`. Waits for the device if the piece is on the host."""
        self._settle(piece)
        for memory, part in self._pairs(start, piece.view(torch.uint8)):
            part.copy_(memory, non_blocking=True)

    def write_from(self, start: int, piece: Tensor) -> None:
        """See `Medium`. Waits for the device."""
        self._settle(piece)
        for memory, part in self._pairs(start, piece.view(torch.uint8)):
            memory.copy_(part)

    def _settle(self, piece: Tensor) -> None:
        current = self._current()
        for stream in (self._inward, self._outward):
            current.wait_event(stream.record_event())
        if piece.device.type == "cpu":
            accelerators.wait(self._device)

    def settle(self) -> None:
        """See `Medium`: transfers come after what the current stream, and the host, have written."""
        written = self._current().record_event()
        for stream in (self._inward, self._outward):
            stream.wait_event(written)

    def check(self) -> None:
        """Memory does not fail."""

    has_failed = False

    def written_anew(self) -> AbstractContextManager[None]:
        """Nor is there anything to forget."""
        return nullcontext()

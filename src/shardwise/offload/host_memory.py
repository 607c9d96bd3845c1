"""Memory of the host that a device copies from and to by itself, beside what it computes."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from shardwise import accelerators
from shardwise.errors import UsageError
from shardwise.files.direct import huge_page_buffer


class HostMemory:
    """A `Medium` on streams of its own, one for each direction: links work both ways at once.

    What orders memory is events. A transfer comes after everything that was to use its buffer on any stream, and after
    the last transfer at its place. It is over for the host at once.
    """

    is_over = True

    def __init__(self, device: torch.device, what: str, pin: bool = True) -> None:
        """`what`: is kept in it, for errors. `pin`: lock its pages, so that copies go beside what the host does."""
        self.nbytes = 0
        self._device = device
        self._what = what
        self._pin = pin
        self._segments: list[Tensor] = []
        self._starts: list[int] = []
        self._inward = accelerators.new_stream(device)
        self._outward = accelerators.new_stream(device)
        self._users: dict[int, set[torch.Stream]] = {}
        """By the address of a buffer: streams that use it since its last transfer."""
        self._last: dict[int, torch.Event] = {}
        """Likewise the end of that, or of what was there before the buffer."""
        self._written: dict[int, torch.Event] = {}
        """By place: the end of the last write."""

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
        if self._pin:
            weakref.finalize(self, _give_back, self._pinned(memory), memory, self._device).atexit = False
        self._starts.append(self.nbytes)
        self._segments.append(memory)
        self.nbytes = nbytes

    def _pinned(self, memory: Tensor) -> Callable[[], object]:
        try:
            return accelerators.pin(memory, self._device)
        except RuntimeError as error:
            raise UsageError(
                f"offload: {memory.nbytes} bytes of host memory for this rank's {self._what} cannot be pinned "
                f"({error}): raise the limit (ulimit -l), or set offload.pin = false"
            ) from error

    def _pairs(self, start: int, piece: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Memory from byte `start` on as long as a piece is, segment by segment, each with that part of the piece."""
        done = 0
        while done < piece.numel():
            index = bisect_right(self._starts, start + done) - 1
            offset = start + done - self._starts[index]
            memory = self._segments[index][offset : offset + piece.numel() - done]
            yield memory, piece[done : done + memory.numel()]
            done += memory.numel()

    # Buffers ----------------------------------------------------------------------------------------------------------

    def buffer(self, nbytes: int) -> Tensor:
        """Memory of the device's allocator."""
        with torch.inference_mode(False):  # it is written in any mode, and has a version
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._last[buffer.data_ptr()] = self._current().record_event()  # whoever had the block was on that stream
        return buffer

    def read(self, start: int, buffer: Tensor) -> HostMemory:
        """See `Medium`."""
        self._after_uses(buffer, self._inward)
        if start in self._written:
            self._inward.wait_event(self._written[start])
        with accelerators.on(self._inward):
            for memory, part in self._pairs(start, buffer.data):  # no write, as versions go
                part.copy_(memory, non_blocking=True)
        self._last[buffer.data_ptr()] = self._inward.record_event()
        return self

    def write(self, start: int, buffer: Tensor) -> HostMemory:
        """See `Medium`."""
        self._after_uses(buffer, self._outward)
        with accelerators.on(self._outward):
            for memory, part in self._pairs(start, buffer.data):
                memory.copy_(part, non_blocking=True)
        self._last[buffer.data_ptr()] = self._written[start] = self._outward.record_event()
        return self

    def wait(self) -> None:
        """As a `Transfer`: who uses the buffer is on a stream, which waits in `use`."""

    def use(self, buffer: Tensor) -> None:
        """See `Medium`."""
        stream = self._current()
        users = self._users.setdefault(buffer.data_ptr(), set())
        if stream not in users:
            stream.wait_event(self._last[buffer.data_ptr()])
            users.add(stream)

    def claim(self, buffer: Tensor) -> None:
        """See `Medium`."""
        stream = self._current()
        self._after_uses(buffer, stream)
        self._users[buffer.data_ptr()] = {stream}

    def drop(self, buffer: Tensor) -> None:
        """See `Medium`. The allocator takes the memory back behind the current stream."""
        self._after_uses(buffer, self._current())
        del self._last[buffer.data_ptr()]

    def _after_uses(self, buffer: Tensor, stream: torch.Stream) -> None:
        """Order a stream after all that a buffer was used for."""
        for user in self._users.pop(buffer.data_ptr(), ()):
            stream.wait_event(user.record_event())
        stream.wait_event(self._last[buffer.data_ptr()])

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


def _give_back(unpin: Callable[[], object], memory: Tensor, device: torch.device) -> None:
    accelerators.wait(device)
    unpin()
    del memory

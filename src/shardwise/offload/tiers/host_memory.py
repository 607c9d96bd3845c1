"""Host memory as a tier: the device copies to and from it while it computes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from shardwise import accelerators, device_tools
from shardwise.errors import UsageError
from shardwise.files.direct import huge_page_buffer
from shardwise.offload.tiers.device_buffers import DeviceBuffers, follow
from shardwise.offload.tiers.pinned import Pinned


class HostMemory:
    """A `Tier` in host memory, with one stream for each direction, because links carry both directions at once.

    Events order all accesses: those of its buffers, and those of the last write and the last read at each place. The
    host never waits for a transfer, so `is_over` is always true.
    """

    is_over = True

    def __init__(self, device: torch.device, what: str, pin: bool = True) -> None:
        """`what`: the contents in words, for errors. `pin`: lock the pages, so that copies do not block the host."""
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
        """By first byte: the end of the last write there."""
        self._read: dict[int, torch.Event] = {}
        """By first byte: the end of the last read since that write. The next write may be from another buffer."""

    @property
    def host_bytes(self) -> int:
        """See `Tier`."""
        return self.nbytes

    disk_bytes = 0

    @property
    def where(self) -> str:
        """The tier in words, for error messages."""
        return "in host memory"

    # Room -------------------------------------------------------------------------------------------------------------

    def grow(self, nbytes: int) -> None:
        """See `Tier`."""
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
        """Yield the memory from byte `start` on by segments, each with the part of the piece that belongs there."""
        done = 0
        while done < piece.numel():
            index = bisect_right(self._starts, start + done) - 1
            offset = start + done - self._starts[index]
            memory = self._segments[index].memory[offset : offset + piece.numel() - done]
            yield memory, piece[done : done + memory.numel()]
            done += memory.numel()

    # Buffers ----------------------------------------------------------------------------------------------------------

    def buffer(self, nbytes: int) -> Tensor:
        """See `Tier`."""
        return self._buffers.new(nbytes)

    def read(self, start: int, buffer: Tensor) -> HostMemory:
        """See `Tier`."""
        follow(self._inward, self._buffers.before(buffer))
        if start in self._written:
            self._inward.wait_event(self._written[start])
        with accelerators.on(self._inward):
            for memory, part in self._pairs(start, buffer.data):  # `_version` stays
                part.copy_(memory, non_blocking=True)
        self._read[start] = self._buffers.copied(buffer, self._inward)
        return self

    def write(self, start: int, buffer: Tensor) -> HostMemory:
        """See `Tier`."""
        follow(self._outward, self._buffers.before(buffer))
        if start in self._read:
            self._outward.wait_event(self._read.pop(start))
        with accelerators.on(self._outward):
            for memory, part in self._pairs(start, buffer.data):
                memory.copy_(part, non_blocking=True)
        self._written[start] = self._buffers.copied(buffer, self._outward)
        return self

    def wait(self) -> None:
        """See `Transfer`. Returns at once: the stream that uses the buffer waits in `use`."""

    def use(self, buffer: Tensor) -> None:
        """See `Tier`."""
        self._buffers.use(buffer)

    def claim(self, buffer: Tensor) -> None:
        """See `Tier`."""
        self._buffers.claim(buffer)

    def drop(self, buffer: Tensor) -> None:
        """See `Tier`."""
        self._buffers.drop(buffer)

    def _current(self) -> torch.Stream:
        return accelerators.current_stream(self._device)

    # Beside the buffers -----------------------------------------------------------------------------------------------

    def read_into(self, start: int, piece: Tensor) -> None:
        """See `Tier`. Waits for the device if the piece is on the host."""
        self._settle(piece)
        for memory, part in self._pairs(start, piece.view(torch.uint8)):
            part.copy_(memory, non_blocking=True)

    def write_from(self, start: int, piece: Tensor) -> None:
        """See `Tier`. Waits for the device."""
        self._settle(piece)
        for memory, part in self._pairs(start, piece.view(torch.uint8)):
            memory.copy_(part)

    def _settle(self, piece: Tensor) -> None:
        current = self._current()
        for stream in (self._inward, self._outward):
            current.wait_event(stream.record_event())
        if piece.device.type == "cpu":
            device_tools.wait(self._device)

    def settle(self) -> None:
        """See `Tier`. Later transfers wait for what the current stream and the host have written."""
        written = self._current().record_event()
        for stream in (self._inward, self._outward):
            stream.wait_event(written)

    def in_host_memory(self, start: int, nbytes: int) -> Tensor | None:
        """See `Tier`."""
        for copied in (self._written.get(start), self._read.get(start)):
            if copied is not None:
                device_tools.wait_for(copied)
        index = bisect_right(self._starts, start) - 1
        offset = start - self._starts[index]
        memory = self._segments[index].memory[offset : offset + nbytes]
        return memory if memory.numel() == nbytes else None

    def check(self) -> None:
        """Do nothing: memory does not fail."""

    has_failed = False

    def written_anew(self) -> AbstractContextManager[None]:
        """See `Tier`. There is no error to forget."""
        return nullcontext()

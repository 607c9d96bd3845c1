"""Buffers of a ring in device memory, and the events that order their uses and copies."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise import accelerators


class DeviceBuffers:
    """Buffers in device memory, ordered by events: a stream that uses a buffer waits for the last copy to or from it,
    and a copy waits for every use since the last copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._users: dict[int, set[torch.Stream]] = {}
        """By buffer address: the streams that have used the buffer since its last copy."""
        self._last: dict[int, list[torch.Event]] = {}
        """By buffer address: the end of that copy (in a new buffer, of the work that had its memory before), and the
        uses that the next copy must wait for."""

    def new(self, nbytes: int) -> Tensor:
        """Allocate a buffer with the device's allocator."""
        with torch.inference_mode(False):  # written in any mode, so it needs a version
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._last[buffer.data_ptr()] = [self._current().record_event()]  # the block's last user was on that stream
        return buffer

    def use(self, buffer: Tensor) -> None:
        """See `Tier`."""
        stream = self._current()
        users = self._users.setdefault(buffer.data_ptr(), set())
        if stream not in users:
            follow(stream, self._last[buffer.data_ptr()])
            users.add(stream)

    def claim(self, buffer: Tensor) -> None:
        """See `Tier`."""
        stream = self._current()
        follow(stream, self.before(buffer))
        self._last[buffer.data_ptr()] = [stream.record_event()]
        self._users[buffer.data_ptr()] = {stream}

    def drop(self, buffer: Tensor) -> None:
        """See `Tier`. The allocator reuses the memory only behind the current stream."""
        follow(self._current(), self.before(buffer))
        del self._last[buffer.data_ptr()]

    def before(self, buffer: Tensor) -> list[torch.Event]:
        """Return the events that a copy to or from the buffer must wait for."""
        last = self._last[buffer.data_ptr()]
        last += [user.record_event() for user in self._users.pop(buffer.data_ptr(), ())]
        return last

    def copied(self, buffer: Tensor, stream: torch.Stream) -> torch.Event:
        """Note that a copy to or from the buffer, behind the events of `before`, was just enqueued on `stream`.

        Returns the event at its end.
        """
        end = stream.record_event()
        self._last[buffer.data_ptr()] = [end]
        return end

    def _current(self) -> torch.Stream:
        return accelerators.current_stream(self._device)


def follow(stream: torch.Stream, events: list[torch.Event]) -> None:
    """Make all later work on the stream wait for these events."""
    for event in events:
        stream.wait_event(event)

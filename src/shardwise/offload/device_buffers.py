"""Buffers of a ring in a device's memory, and what each use of one has to follow."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise import accelerators


class DeviceBuffers:
    """What orders them is events. A stream that uses a buffer follows the last copy to or from it; a copy follows every
    use since then."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._users: dict[int, set[torch.Stream]] = {}
        """By the address of a buffer: streams that use it since its last copy."""
        self._last: dict[int, list[torch.Event]] = {}
        """Likewise the end of that copy, or of what was there before the buffer, and of uses that a copy is to
        follow."""

    def new(self, nbytes: int) -> Tensor:
        """Memory of the device's allocator."""
        with torch.inference_mode(False):  # it is written in any mode, and has a version
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._last[buffer.data_ptr()] = [self._current().record_event()]  # whoever had the block was on that stream
        return buffer

    def use(self, buffer: Tensor) -> None:
        """See `Medium`."""
        stream = self._current()
        users = self._users.setdefault(buffer.data_ptr(), set())
        if stream not in users:
            follow(stream, self._last[buffer.data_ptr()])
            users.add(stream)

    def claim(self, buffer: Tensor) -> None:
        """See `Medium`."""
        stream = self._current()
        follow(stream, self.before(buffer))
        self._last[buffer.data_ptr()] = [stream.record_event()]
        self._users[buffer.data_ptr()] = {stream}

    def drop(self, buffer: Tensor) -> None:
        """See `Medium`. The allocator takes the memory back behind the current stream."""
        follow(self._current(), self.before(buffer))
        del self._last[buffer.data_ptr()]

    def before(self, buffer: Tensor) -> list[torch.Event]:
        """What a copy to or from it has to follow."""
        last = self._last[buffer.data_ptr()]
        last += [user.record_event() for user in self._users.pop(buffer.data_ptr(), ())]
        return last

    def copied(self, buffer: Tensor, stream: torch.Stream) -> torch.Event:
        """A copy to or from it is enqueued on the stream, behind all that. Returns its end."""
        end = stream.record_event()
        self._last[buffer.data_ptr()] = [end]
        return end

    def _current(self) -> torch.Stream:
        return accelerators.current_stream(self._device)


def follow(stream: torch.Stream, events: list[torch.Event]) -> None:
    """What the stream is given from here on comes after those."""
    for event in events:
        stream.wait_event(event)

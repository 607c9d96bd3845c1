"""A rank's file on disk as a tier for a device with its own memory: each transfer takes two hops.

    file --a thread reads--> stage --copied on a stream--> buffer
    file <--a thread writes-- stage <--copied on a stream-- buffer

Each buffer on the device has a *stage*, pinned host memory of the same size, so the stages take as much host memory as
the rings take device memory. The training thread enqueues all copies. It waits for threads that read, and never for the
device: whatever must wait for a copy runs on a thread of the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise import accelerators, device_tools
from shardwise.errors import UsageError
from shardwise.offload.tiers.device_buffers import DeviceBuffers, follow
from shardwise.offload.tiers.disk import Disk, OnThread
from shardwise.offload.tiers.pinned import Pinned

THREADS = 4
"""Threads of the disk: one more than the number that reads and writes fastest, because one often waits for a copy."""
_PART_BYTES = 32 * 2**20
"""Size of the parts in which `read_into` and `write_from` transfer, which use no stage."""


class StagedDisk:
    """A `Tier` on disk for a device with its own memory.

    `DeviceBuffers` orders the buffers. Beside that, the disk reads into a stage or writes from it only when the stage's
    last copy and its last read or write have finished; a copy from a stage is enqueued when the read has finished, and
    a copy to a stage when the stage's last read or write has; a place in the file is read after earlier writes there
    have finished, and written after earlier reads and writes there have. A write that fails makes the next call raise.
    """

    def __init__(self, disk: Disk, device: torch.device, what: str, pin: bool = True) -> None:
        """`disk`: one without buffers. `what`: its contents in words, for errors. `pin`: as for `HostMemory`."""
        self._disk = disk
        self._device = device
        self._what = what
        self._pin = pin
        self._inward = accelerators.new_stream(device)
        self._outward = accelerators.new_stream(device)
        self._buffers = DeviceBuffers(device)
        self._stages: dict[int, _Stage] = {}
        """By buffer address: the buffer's stage."""
        self._jobs: list[_StageTransfer] = []
        """Reads and writes that threads do or have yet to do; finished ones are removed when the next begins."""
        self._reads: list[_Read] = []
        """Reads whose copy to the buffer is not enqueued yet."""

    @property
    def where(self) -> str:
        """The tier in words, for error messages."""
        return self._disk.where

    @property
    def nbytes(self) -> int:
        """Bytes allocated on disk."""
        return self._disk.nbytes

    @property
    def host_bytes(self) -> int:
        """See `Tier`: bytes of all stages."""
        return sum(stage.memory.nbytes for stage in self._stages.values())

    @property
    def disk_bytes(self) -> int:
        """See `Tier`."""
        return self.nbytes

    def grow(self, nbytes: int) -> None:
        """See `Tier`."""
        self._disk.grow(nbytes)

    # Buffers ----------------------------------------------------------------------------------------------------------

    def buffer(self, nbytes: int) -> Tensor:
        """See `Tier`. Raises UsageError if the host cannot allocate or pin the stage."""
        try:
            memory = self._disk.buffer(nbytes)
        except OSError as error:
            raise UsageError(
                f"offload: the host has no room for a stage of {nbytes} bytes of this rank's {self._what} ({error})"
            ) from error
        stage = _Stage(Pinned(memory, self._device, self._what, self._pin))
        buffer = self._buffers.new(nbytes)
        self._stages[buffer.data_ptr()] = stage
        return buffer

    def read(self, start: int, buffer: Tensor) -> _Read:
        """See `Tier`."""
        self._disk.check()
        self.copy_finished_reads()
        stage = self._stage_of(buffer)
        before = self._buffers.before(buffer)
        reading = _Read(self, self._begin(self._disk.read, start, stage, buffer.numel()), buffer, before)
        self._reads.append(reading)
        return reading

    def copy_finished_reads(self) -> None:
        """Enqueue the copies of all reads that have finished, whether or not anybody waited for them."""
        for reading in [reading for reading in self._reads if reading.job.has_succeeded]:
            self.copy_in(reading)

    def copy_in(self, reading: _Read) -> None:
        """Enqueue the copy from the stage to the buffer. The read must have finished."""
        stage = self._stages[reading.buffer.data_ptr()]
        follow(self._inward, reading.before)
        with accelerators.on(self._inward):
            reading.buffer.data.copy_(stage.memory[: reading.buffer.numel()], non_blocking=True)  # `_version` stays
        stage.copied = self._buffers.copied(reading.buffer, self._inward)
        self.forget(reading)

    def forget(self, reading: _Read) -> None:
        """Never enqueue the copy of this read."""
        self._reads = [other for other in self._reads if other is not reading]

    def is_pending(self, reading: _Read) -> bool:
        """Whether the copy of this read is still to be enqueued."""
        return any(other is reading for other in self._reads)

    def _stage_of(self, buffer: Tensor) -> _Stage:
        """Return the stage of a buffer that gets new contents. Forgets a read of it that an interrupt left over."""
        self._reads = [other for other in self._reads if other.buffer.data_ptr() != buffer.data_ptr()]
        return self._stages[buffer.data_ptr()]

    def write(self, start: int, buffer: Tensor) -> _Write:
        """See `Tier`."""
        self._disk.check()
        self.copy_finished_reads()
        stage = self._stage_of(buffer)
        self._until_written(stage)
        follow(self._outward, self._buffers.before(buffer))
        with accelerators.on(self._outward):
            stage.memory[: buffer.numel()].copy_(buffer.data, non_blocking=True)
        stage.copied = self._buffers.copied(buffer, self._outward)
        return _Write(self._disk, self._begin(self._disk.write, start, stage, buffer.numel(), writes=True))

    def _until_written(self, stage: _Stage) -> None:
        """Wait until the disk has finished with the stage. Only a stage without a read since its last write is busy."""
        for job in self._of(stage):
            job.end()

    def _begin(
        self,
        move: Callable[[int, Tensor, Callable[[], object]], OnThread],
        start: int,
        stage: _Stage,
        nbytes: int,
        writes: bool = False,
    ) -> OnThread:
        """Have a thread read or write, once earlier work on the stage and on that place in the file has finished."""
        self._jobs = [job for job in self._jobs if not job.on_thread.is_over]
        earlier = [*self._of(stage), *self._at(start, start + nbytes, writes)]
        on_thread = move(start, stage.memory[:nbytes], partial(_await, earlier, stage.copied, self._device))
        self._jobs.append(_StageTransfer(on_thread, stage.memory.data_ptr(), start, start + nbytes, writes))
        return on_thread

    def _of(self, stage: _Stage) -> list[OnThread]:
        """Return the reads and writes that use a stage."""
        return [job.on_thread for job in self._jobs if job.stage == stage.memory.data_ptr()]

    def _at(self, start: int, stop: int, writes: bool) -> list[OnThread]:
        """Return what a read or write of bytes [start, stop) of the file waits for: a read waits only for writes."""
        return [job.on_thread for job in self._jobs if job.start < stop and start < job.stop and (writes or job.writes)]

    def use(self, buffer: Tensor) -> None:
        """See `Tier`."""
        self._buffers.use(buffer)

    def claim(self, buffer: Tensor) -> None:
        """See `Tier`."""
        self._stage_of(buffer)
        self._buffers.claim(buffer)

    def drop(self, buffer: Tensor) -> None:
        """See `Tier`. A thread unpins the stage once all work on it has finished."""
        stage = self._stage_of(buffer)
        self._buffers.drop(buffer)
        del self._stages[buffer.data_ptr()]
        earlier = self._of(stage)
        self._disk.drop(stage.memory)
        self._disk.later(partial(_give_back, stage, earlier, self._device))

    # Beside the buffers -----------------------------------------------------------------------------------------------

    def read_into(self, start: int, piece: Tensor) -> None:
        """See `Tier`. Waits for the device and the disk."""
        self._until_quiet()
        for first, part in _parts(piece):
            host = part if part.device.type != self._device.type else torch.empty_like(part, device=accelerators.CPU)
            self._disk.read_into(start + first, host)
            if host is not part:
                part.copy_(host)

    def write_from(self, start: int, piece: Tensor) -> None:
        """See `Tier`. Waits for the device and the disk."""
        self._until_quiet()
        for first, part in _parts(piece):
            self._disk.write_from(start + first, part.cpu())

    def settle(self) -> None:
        """See `Tier`."""
        self._disk.settle()

    def _until_quiet(self) -> None:
        """Wait until all reads and writes have finished, whether or not they failed."""
        for job in self._jobs:
            job.on_thread.end()
        self._jobs.clear()

    # Failures ---------------------------------------------------------------------------------------------------------

    def in_host_memory(self, start: int, nbytes: int) -> None:
        """See `Tier`."""

    def check(self) -> None:
        """See `Tier`. Failures of transfers under way may not be known yet."""
        self._disk.check()

    @property
    def has_failed(self) -> bool:
        """See `Tier`. Waits for transfers under way."""
        self._until_quiet()
        return self._disk.has_failed

    @contextmanager
    def written_anew(self) -> Iterator[None]:
        """See `Tier`."""
        self._until_quiet()
        with self._disk.written_anew():
            yield
            self._until_quiet()
            self._disk.check()


class _Stage:
    """The pinned host memory of one buffer."""

    def __init__(self, pinned: Pinned) -> None:
        self.pinned = pinned
        self.memory = pinned.memory
        self.copied: torch.Event | None = None
        """The end of the last copy from or to the stage."""


class _StageTransfer(NamedTuple):
    """A thread's read or write between a stage, given by its address, and bytes [start, stop) of the file."""

    on_thread: OnThread
    stage: int
    start: int
    stop: int
    writes: bool


class _Read:
    """A `Transfer` to a buffer. `wait` enqueues the copy unless that was done before."""

    def __init__(self, disk: StagedDisk, job: OnThread, buffer: Tensor, before: list[torch.Event]) -> None:
        self._disk = disk
        self.job = job
        self.buffer = buffer
        """The very tensor that was passed in, not a new view: `OffloadedSlice` counts the tensors over this memory."""
        self.before = before
        """Events that the copy must wait for."""

    @property
    def is_over(self) -> bool:
        return self.job.is_over

    def wait(self) -> None:
        try:
            self.job.wait()
        except UsageError:
            self._disk.forget(self)
            raise
        if self._disk.is_pending(self):
            self._disk.copy_in(self)


class _Write:
    """A `Transfer` from a buffer.

    The buffer can be reused at once, because its events order the next use behind the copy, and a thread waits for the
    disk. `is_over` only once the bytes are on disk, so that buffers whose stages are free are taken first.
    """

    def __init__(self, disk: Disk, job: OnThread) -> None:
        self._disk = disk
        self._job = job

    @property
    def is_over(self) -> bool:
        return self._job.is_over

    def wait(self) -> None:
        self._disk.check()


def _await(earlier: list[OnThread], copied: torch.Event | None, device: torch.device) -> None:
    """Wait, on a thread of the disk, until a stage and a place in the file can be read or written."""
    for job in earlier:
        job.end()
    if copied is not None:
        device_tools.wait_on_thread(copied, device)


def _give_back(stage: _Stage, earlier: list[OnThread], device: torch.device) -> None:
    _await(earlier, stage.copied, device)
    stage.pinned.give_back()


def _parts(piece: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield a 1-D tensor in parts: the first byte of each, and its bytes."""
    whole = piece.view(torch.uint8)
    for first in range(0, whole.numel(), _PART_BYTES):
        yield first, whole[first : first + _PART_BYTES]

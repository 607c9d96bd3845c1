"""A rank's file on disk as a tier, the threads that read and write it, and the record of its failures."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import UsageError
from shardwise.files.direct import huge_page_buffer
from shardwise.files.scratch_file import ScratchFile
from shardwise.files.thread_pool import ThreadPool

_THREADS = 3


class Disk:
    """A `Tier` that is one scratch file, created by the first `grow`.

    After an error every read, write and check raises UsageError until `written_anew` has succeeded.
    """

    def __init__(self, directory: Path, what: str, threads: int = _THREADS) -> None:
        """`what`: the file's contents in words, for errors. `threads`: how many read and write it."""
        self.directory = directory
        self._what = what
        self._file: ScratchFile | None = None
        self._failure: OSError | RuntimeError | None = None
        self._threads = threads
        self._pool: ThreadPool | None = None
        self._memory: dict[int, memoryview] = {}
        """By buffer address: its memory. Threads hold no tensor, since a buffer is free when no tensor refers to it."""

    @property
    def where(self) -> str:
        """The tier in words, for error messages."""
        return f"on disk ({os.fspath(self.directory)})"

    @property
    def nbytes(self) -> int:
        """Bytes allocated on disk."""
        return 0 if self._file is None else self._file.nbytes

    host_bytes = 0

    @property
    def disk_bytes(self) -> int:
        """See `Tier`."""
        return self.nbytes

    @property
    def file(self) -> ScratchFile:
        """The scratch file, which exists after the first `grow`."""
        assert self._file is not None
        return self._file

    def grow(self, nbytes: int) -> None:
        """See `Tier`. Raises UsageError if the disk is full."""
        if nbytes <= self.nbytes:
            return
        try:
            if self._file is None:
                self._file = ScratchFile(self.directory)
            self._file.grow(nbytes)
        except OSError as error:
            raise UsageError(
                f"offload: {self.directory} has no room for {nbytes} bytes of this rank's {self._what} ({error}): free "
                "disk space, or set offload.path to another disk"
            ) from error

    # Buffers ----------------------------------------------------------------------------------------------------------

    def buffer(self, nbytes: int) -> Tensor:
        """See `Tier`."""
        with torch.inference_mode(False):  # written in any mode, so it needs a version
            memory = huge_page_buffer(nbytes)
            buffer = torch.frombuffer(memory, dtype=torch.uint8)
        self._memory[buffer.data_ptr()] = memory
        return buffer

    def read(self, start: int, buffer: Tensor, after: Callable[[], object] | None = None) -> OnThread:
        """See `Tier`. A thread calls `after`, then reads."""
        return self._submit(self.file.read, start, buffer, after)

    def write(self, start: int, buffer: Tensor, after: Callable[[], object] | None = None) -> OnThread:
        """See `Tier`. A thread calls `after`, then writes."""
        return self._submit(self.file.write, start, buffer, after)

    def _submit(
        self,
        function: Callable[[int, memoryview], None],
        start: int,
        buffer: Tensor,
        after: Callable[[], object] | None,
    ) -> OnThread:
        self.check()
        memory = self._memory[buffer.data_ptr()][: buffer.numel()]
        return self.later(partial(self._transfer, function, start, memory, after))

    def _transfer(
        self,
        function: Callable[[int, memoryview], None],
        start: int,
        memory: memoryview,
        after: Callable[[], object] | None,
    ) -> None:
        """Read or write on a thread. Errors are noted here, because nobody may ever wait for a write."""
        with self.failing():
            if after is not None:
                after()
            self.check()  # not to read what an earlier write failed to store
            function(start, memory)

    def later(self, function: Callable[[], object]) -> OnThread:
        """Have a thread call `function`. Calls start in the order in which they were submitted."""
        if self._pool is None:
            self._pool = ThreadPool(self._threads).__enter__()
            weakref.finalize(self, self._pool.stop)  # runs on any thread, perhaps one of the pool
        return OnThread(self._pool.submit(function))

    def use(self, buffer: Tensor) -> None:
        """Do nothing: the host has waited for the transfers, so there is nothing to order."""

    def claim(self, buffer: Tensor) -> None:
        """Do nothing, as in `use`."""

    def drop(self, buffer: Tensor) -> None:
        """See `Tier`."""
        del self._memory[buffer.data_ptr()]

    # Failures ---------------------------------------------------------------------------------------------------------

    def in_host_memory(self, start: int, nbytes: int) -> None:
        """See `Tier`."""

    def check(self) -> None:
        """Raise UsageError if an earlier read or write of the file failed."""
        if self._failure is not None:
            raise UsageError(
                f"the file of this rank's {self._what} in {self.directory} is lost, because it could not be read or "
                f"written ({self._failure}): weights and state may be of different steps. Load the last checkpoint "
                "with sw.checkpoint.load(path, model, optimizer)"
            ) from self._failure

    @property
    def has_failed(self) -> bool:
        """Whether `check` raises."""
        return self._failure is not None

    @contextmanager
    def written_anew(self) -> Iterator[None]:
        """See `Tier`."""
        failure, self._failure = self._failure, None
        try:
            yield
        except BaseException:
            self._failure = self._failure or failure
            raise

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Note an error of the file, or of a device that copies for it, and raise the UsageError of all later calls."""
        try:
            yield
        except UsageError:
            raise
        except (OSError, EOFError, RuntimeError) as error:
            self._failure = OSError(f"the file ends at byte {error}") if isinstance(error, EOFError) else error
            self.check()

    def read_into(self, start: int, piece: Tensor) -> None:
        """Fill a plain 1-D tensor from byte `start` of the file. Raises UsageError."""
        self.check()
        if piece.numel():
            with self.failing():
                self.file.read_some(start, piece.view(torch.uint8).numpy().data)

    def write_from(self, start: int, piece: Tensor) -> None:
        """Write a plain 1-D tensor from byte `start` of the file. On disk only after `settle`. Raises UsageError."""
        self.check()
        if piece.numel():
            with self.failing():
                self.file.write_some(start, piece.view(torch.uint8).numpy().data)

    def settle(self) -> None:
        """See `Tier`."""
        if self._file is not None:
            with self.failing():
                self._file.settle()


class OnThread:
    """A `Transfer` that a thread carries out."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    @property
    def is_over(self) -> bool:
        """See `Transfer`."""
        return self._future.done()

    @property
    def has_succeeded(self) -> bool:
        """Whether the transfer has finished without an error."""
        return self._future.done() and self._future.exception() is None

    def wait(self) -> None:
        """See `Transfer`."""
        self._future.result()

    def end(self) -> None:
        """Wait for the end of the transfer; does not raise if it failed."""
        self._future.exception()

"""A rank's file on disk, the threads that read and write it, and what is known of its failures."""

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
    """A `Medium` that is one scratch file, made when room is first taken.

    After an error every call raises UsageError, until all that is in the file has been written anew.
    """

    def __init__(self, directory: Path, what: str, threads: int = _THREADS) -> None:
        """`what`: is kept in the file, for errors. `threads`: read and write it."""
        self.directory = directory
        self._what = what
        self._file: ScratchFile | None = None
        self._failure: OSError | RuntimeError | None = None
        self._threads = threads
        self._pool: ThreadPool | None = None
        self._memory: dict[int, memoryview] = {}
        """Of buffers, by address. Threads hold no tensor: a buffer is free when no tensor refers to it."""

    @property
    def where(self) -> str:
        """For errors."""
        return f"on disk ({os.fspath(self.directory)})"

    @property
    def nbytes(self) -> int:
        """Taken on disk."""
        return 0 if self._file is None else self._file.nbytes

    @property
    def file(self) -> ScratchFile:
        """There is one once room was taken."""
        assert self._file is not None
        return self._file

    def grow(self, nbytes: int) -> None:
        """See `Medium`. Raises where the disk has no room."""
        if nbytes <= self.nbytes:
            return
        try:
            if self._file is None:
                self._file = ScratchFile(self.directory)
            self._file.grow(nbytes)
        except OSError as error:
            raise UsageError(
                f"offload: {self.directory} has no room for {nbytes} bytes of this rank's {self._what} ({error}): "
                "free some, or set offload.path to another disk"
            ) from error

    # Buffers ----------------------------------------------------------------------------------------------------------

    def buffer(self, nbytes: int) -> Tensor:
        """See `Medium`."""
        with torch.inference_mode(False):  # it is written in any mode, and has a version
            memory = huge_page_buffer(nbytes)
            buffer = torch.frombuffer(memory, dtype=torch.uint8)
        self._memory[buffer.data_ptr()] = memory
        return buffer

    def read(self, start: int, buffer: Tensor, after: Callable[[], object] | None = None) -> OnThread:
        """See `Medium`. A thread does it, when `after` has returned there."""
        return self._submit(self.file.read, start, buffer, after)

    def write(self, start: int, buffer: Tensor, after: Callable[[], object] | None = None) -> OnThread:
        """Likewise."""
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
        """On a thread. Errors are known at once: nobody may wait for a write."""
        with self.failing():
            if after is not None:
                after()
            self.check()  # what a thread before this one could not write is not to be read
            function(start, memory)

    def later(self, function: Callable[[], object]) -> OnThread:
        """Have a thread call that, behind what threads were given before."""
        if self._pool is None:
            self._pool = ThreadPool(self._threads).__enter__()
            weakref.finalize(self, self._pool.stop)  # from whatever thread: it may be one of these
        return OnThread(self._pool.submit(function))

    def use(self, buffer: Tensor) -> None:
        """Nothing is to be ordered: transfers were waited for."""

    def claim(self, buffer: Tensor) -> None:
        """Likewise."""

    def drop(self, buffer: Tensor) -> None:
        """See `Medium`."""
        del self._memory[buffer.data_ptr()]

    # Failures ---------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise UsageError if the file could not be read or written before."""
        if self._failure is not None:
            raise UsageError(
                f"what is kept of {self._what} in {self.directory} is lost since it could not be read or written "
                f"({self._failure}): weights and state may be of different steps. Load the last checkpoint with "
                "sw.checkpoint.load(path, model, optimizer)"
            ) from self._failure

    @property
    def has_failed(self) -> bool:
        """Whether `check` raises."""
        return self._failure is not None

    @contextmanager
    def written_anew(self) -> Iterator[None]:
        """Inside, all that is of use in the file is written: if that succeeds, an error of before is forgotten."""
        failure, self._failure = self._failure, None
        try:
            yield
        except BaseException:
            self._failure = self._failure or failure
            raise

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Note an error of the file, or of a device that copies for it, and raise it as every later call will."""
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
        """Likewise write; on disk after `settle`."""
        self.check()
        if piece.numel():
            with self.failing():
                self.file.write_some(start, piece.view(torch.uint8).numpy().data)

    def settle(self) -> None:
        """Have everything on disk that `write_from` wrote."""
        if self._file is not None:
            with self.failing():
                self._file.settle()


class OnThread:
    """A `Transfer` that a thread does."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    @property
    def is_over(self) -> bool:
        """See `Transfer`."""
        return self._future.done()

    @property
    def has_succeeded(self) -> bool:
        """Whether it is over, without an error."""
        return self._future.done() and self._future.exception() is None

    def wait(self) -> None:
        """See `Transfer`."""
        self._future.result()

    def end(self) -> None:
        """Wait, whether it fails or not."""
        self._future.exception()

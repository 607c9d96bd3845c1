"""One slice of weights or gradients, stored off the device: its place on a tier and, for a while, a ring buffer.

                   --read_ahead-->            --load-->
        OFFLOADED                  READING              RESIDENT --let_go, if it was written--> WRITING
           ^                                               |                                       |
           +---------------let_go, if it was not-----------+                                       |
           +-------------------------------the write is over---------------------------------------+

Code that reads or writes the slice first has it loaded (`flat`, `load`, `claim`) and holds a view of the buffer. The
buffer is given back when another slice is to be loaded and no view is left. So there is never more than one copy of the
numbers that anybody can change.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from shardwise.errors import UsageError
from shardwise.files.direct import PAGE_BYTES
from shardwise.fsdp.layout import round_up
from shardwise.offload import host_threads
from shardwise.offload.shard_store import ShardStore
from shardwise.offload.tiers.tier import Transfer


class SliceState(enum.Enum):
    """Where the numbers of a slice are."""

    OFFLOADED = "offloaded"
    """On the tier only."""
    READING = "reading"
    """Being read into a buffer."""
    RESIDENT = "resident"
    """In a buffer. If the buffer was written to, the tier holds older numbers."""
    WRITING = "writing"
    """In a buffer, being written back to the tier."""


_MOVES: dict[SliceState, tuple[SliceState, ...]] = {
    SliceState.OFFLOADED: (SliceState.READING, SliceState.RESIDENT),
    SliceState.READING: (SliceState.RESIDENT, SliceState.OFFLOADED),
    SliceState.RESIDENT: (SliceState.WRITING, SliceState.OFFLOADED),
    SliceState.WRITING: (SliceState.RESIDENT, SliceState.OFFLOADED),
}


class OffloadedSlice:
    """One slice: 1-D, of one dtype. Does not communicate; errors of the tier are UsageErrors."""

    def __init__(self, store: ShardStore, numel: int, dtype: torch.dtype) -> None:
        """Choose a place on the tier, without allocating it yet."""
        self.store = store
        self.dtype = dtype
        self.numel = numel
        self.nbytes = round_up(numel * dtype.itemsize, PAGE_BYTES)
        self.start = store.place(self.nbytes)
        """First byte of the slice on the tier."""
        weakref.finalize(self, store.vacate, self.start, self.nbytes).atexit = False
        self.state = SliceState.OFFLOADED
        self._buffer: Tensor | None = None
        self._bytes: Tensor | None = None
        """The part of the buffer that the slice fills: the one tensor that all views are made from."""
        self._own_references = 0
        """Value of `_references` while nobody holds a view."""
        self._under_way: Transfer | None = None
        self._clean_version = 0
        """Value of `_bytes._version` when buffer and tier last held the same numbers."""
        self._is_written = False
        """Whether `note_write` was called since then, for a write that `_bytes._version` may not count."""
        self._former_versions = 0
        """Added to `_bytes._version` to give `_version`, which goes on when the buffer changes."""
        self._norms: Mapping[int, Tensor] = {}
        """2-norms of pieces, by their offsets, at `_norms_version`."""
        self._norms_version = 0

    def _move(self, state: SliceState) -> None:
        """Change the state. Nothing else does."""
        assert state in _MOVES[self.state], f"an offloaded slice: {self.state.value} -> {state.value}"
        self.state = state

    @property
    def _version(self) -> int:
        """Like a tensor's `_version`: grows with every write, and not when the slice is loaded or written back."""
        return self._former_versions + (0 if self._bytes is None else self._bytes._version)

    # Loading ----------------------------------------------------------------------------------------------------------

    def flat(self) -> Tensor:
        """Load the slice and return a view of it for the current stream. The buffer stays while any view of it exists.

        Writes to the view reach the tier later, if they raise the tensor's version or are reported by `note_write`.
        """
        view = self.load()
        assert self._buffer is not None
        self.store.tier.use(self._buffer)
        return view

    def lend(self) -> Tensor:
        """Return a view for external code, after whose last view the slice is written back in any case: collectives,
        kernels and writes to `.data` raise no version."""
        view = self.flat()
        self._is_written = True
        self._norms = {}
        return view

    def load(self) -> Tensor:
        """Like `flat`, but only to keep the slice in its buffer: the view must not be read or written."""
        if self.state is not SliceState.RESIDENT:
            self.store.tier.check()
            self.store.make_way()
            if self.state is SliceState.OFFLOADED:
                self._begin_read(self.store.take_buffer())
            self._wait()
            self._move(SliceState.RESIDENT)
        return self._view()

    def _view(self) -> Tensor:
        assert self._bytes is not None
        with torch.inference_mode(False):  # inside it, writes to a view of another dtype would not raise `_version`
            return self._bytes[: self.numel * self.dtype.itemsize].view(self.dtype)

    def begin_anew(self) -> None:
        """Fill the slice with zeros without reading it from the tier, because the caller writes all of it."""
        self.claim()
        assert self._bytes is not None
        self._bytes.zero_()

    def claim(self) -> Tensor:
        """Like `flat`, but without reading the tier: the caller overwrites the whole slice, on the current stream or
        on one that waits for it."""
        self.store.make_way()
        if self.state is not SliceState.RESIDENT:
            self.finish()
            self._take(self.store.take_buffer())
            self._move(SliceState.RESIDENT)
        assert self._buffer is not None
        self.store.tier.claim(self._buffer)
        self.note_write()
        return self._view()

    def read_ahead(self) -> None:
        """Begin to read the slice, which will be needed soon, if a buffer is free."""
        if self.state is SliceState.OFFLOADED and (buffer := self.store.take_free_buffer()) is not None:
            self._begin_read(buffer)

    def _begin_read(self, buffer: Tensor) -> None:
        self._take(buffer)
        self._move(SliceState.READING)
        assert self._bytes is not None
        try:
            self._under_way = self.store.tier.read(self.start, self._bytes)
        except BaseException:  # of a disk that failed earlier
            self._rest()
            raise

    def _take(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._bytes = buffer[: self.nbytes]
        self._clean_version = self._bytes._version
        self._former_versions -= self._clean_version
        self._own_references = self._references()
        self.store.hold(self)

    def _wait(self) -> None:
        """Wait for the buffer's transfer. After an error the slice is at rest; after an interrupt the transfer is still
        under way and the slice keeps its buffer."""
        assert self._under_way is not None
        try:
            self._under_way.wait()
        except UsageError:
            self._under_way = None
            self._rest()
            raise
        self._under_way = None

    def in_host_memory(self) -> Tensor | None:
        """See `sharded.extensions.offloaded.Slice`."""
        self.leave()
        self.finish()
        if self.state is not SliceState.OFFLOADED:  # somebody holds a view of the buffer
            return None
        memory = self.store.tier.in_host_memory(self.start, self.numel * self.dtype.itemsize)
        return None if memory is None else memory.view(self.dtype)

    def note_norms(self, norms: Mapping[int, Tensor]) -> None:
        """Keep the 2-norms of the slice's pieces, by their offsets, until it is written. Nobody may hold a view of it:
        a write through that may raise no version."""
        assert not self.is_viewed
        self._norms, self._norms_version = norms, self._version

    @property
    def knows_norms(self) -> bool:
        """Whether norms were noted and the slice was not written since."""
        return bool(self._norms) and self._norms_version == self._version

    def norm_at(self, offset: int) -> Tensor | None:
        """See `sharded.extensions.offloaded.Slice`."""
        return self._norms[offset] if self.knows_norms else None

    @property
    def host_computes(self) -> bool:
        """See `sharded.extensions.offloaded.Slice`."""
        return self.store.host_computes

    @contextmanager
    def at_rest(self) -> Iterator[Tensor | None]:
        """See `sharded.extensions.offloaded.Slice`."""
        memory = self.in_host_memory()
        with host_threads.on_host() if memory is not None else nullcontext():
            yield memory

    # Leaving ----------------------------------------------------------------------------------------------------------

    def note_write(self) -> None:
        """Note that the slice was written, perhaps in a way that `_version` of the buffer does not count."""
        self._former_versions += 1
        self._is_written = self._is_written or self.state is SliceState.RESIDENT

    def _references(self) -> int:
        """Return how many tensors refer to the buffer's storage."""
        assert self._bytes is not None
        count: int = torch._C._storage_Use_Count(self._bytes.untyped_storage()._cdata)
        return count

    @property
    def is_viewed(self) -> bool:
        """Whether anybody holds a view of the buffer."""
        return self._bytes is not None and self._references() > self._own_references

    def leave(self) -> None:
        """Let go of the slice at once, not only when another slice needs a buffer. The current stream must be behind
        all work on it."""
        if self.state is SliceState.RESIDENT:
            assert self._buffer is not None
            self.store.tier.use(self._buffer)
            self.let_go()

    def let_go(self) -> None:
        """Give the buffer back, now or once it is written. Does nothing while anybody holds a view of it."""
        if self.state is not SliceState.RESIDENT or self.is_viewed:
            return
        assert self._bytes is not None
        if not self._is_written and self._bytes._version == self._clean_version:
            self._rest()
            return
        self._under_way = self.store.tier.write(self.start, self._bytes)
        self._is_written, self._clean_version = False, self._bytes._version
        self._move(SliceState.WRITING)

    @property
    def is_being_read(self) -> bool:
        """Whether the slice is being read into its buffer."""
        return self.state is SliceState.READING

    @property
    def is_being_written(self) -> bool:
        """Whether the slice is being written back to the tier."""
        return self.state is SliceState.WRITING

    @property
    def is_written(self) -> bool:
        """Whether the slice's write has finished, so that `finish` frees the buffer without waiting."""
        return self.state is SliceState.WRITING and self._under_way is not None and self._under_way.is_over

    def finish(self) -> None:
        """Wait for a read or write under way, then give the buffer back."""
        if self.state in (SliceState.READING, SliceState.WRITING):
            self._wait()
            self._rest()

    def _rest(self) -> None:
        assert self._bytes is not None
        assert self._buffer is not None
        self._move(SliceState.OFFLOADED)
        self._former_versions += self._bytes._version
        buffer, self._buffer, self._bytes = self._buffer, None, None
        self.store.give_back(self, buffer)

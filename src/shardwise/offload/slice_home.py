"""Where one slice of weights or gradients lives that rests on a medium: there, or for a while in a buffer of the ring.

                 --read_ahead-->            --come-->
        RESTING                  READING               HERE --let_go, if it was written--> WRITING
           ^                                            |                                     |
           +---------------let_go, if it was not--------+                                     |
           +------------------------------the write is over-----------------------------------+

Whoever reads or writes the slice has it come, and has a view of the buffer. The buffer is given back when another slice
is to come and nobody has a view any more: so there is never more than one copy of the numbers that anybody can change.
"""

from __future__ import annotations

import enum
import weakref

import torch
from torch import Tensor

from shardwise.errors import UsageError
from shardwise.files.direct import PAGE_BYTES
from shardwise.layout.flat import round_up
from shardwise.offload.medium import Transfer
from shardwise.offload.shard_store import ShardStore


class HomeState(enum.Enum):
    """Where the numbers are."""

    RESTING = "resting"
    """On the medium alone."""
    READING = "reading"
    """On their way to a buffer."""
    HERE = "here"
    """In a buffer. If they were written, the medium has older ones."""
    WRITING = "writing"
    """In a buffer, on their way back."""


_MOVES: dict[HomeState, tuple[HomeState, ...]] = {
    HomeState.RESTING: (HomeState.READING, HomeState.HERE),
    HomeState.READING: (HomeState.HERE, HomeState.RESTING),
    HomeState.HERE: (HomeState.WRITING, HomeState.RESTING),
    HomeState.WRITING: (HomeState.HERE, HomeState.RESTING),
}


class SliceHome:
    """Of one slice: 1-D, of one dtype. No communication; errors of the medium are UsageErrors."""

    def __init__(self, store: ShardStore, numel: int, dtype: torch.dtype) -> None:
        """Takes no room yet."""
        self.store = store
        self.dtype = dtype
        self.numel = numel
        self.nbytes = round_up(numel * dtype.itemsize, PAGE_BYTES)
        self.start = store.place(self.nbytes)
        """First byte on the medium."""
        weakref.finalize(self, store.vacate, self.start, self.nbytes).atexit = False
        self.state = HomeState.RESTING
        self._buffer: Tensor | None = None
        self._bytes: Tensor | None = None
        """The slice's part of the buffer, as the one tensor that views are made of."""
        self._own_references = 0
        """What `_references` gives while nobody has a view."""
        self._under_way: Transfer | None = None
        self._clean_version = 0
        """Of `_bytes`, when it held what the medium holds."""
        self._is_written = False
        """In a way that no version tells."""
        self._former_versions = 0
        """What `_version` is without that of `_bytes`."""

    def _move(self, state: HomeState) -> None:
        """The only place where the state changes."""
        assert state in _MOVES[self.state], f"a slice at rest: {self.state.value} -> {state.value}"
        self.state = state

    @property
    def _version(self) -> int:
        """As a tensor's: grows with every write, and not when the numbers come and go."""
        return self._former_versions + (0 if self._bytes is None else self._bytes._version)

    # Coming -----------------------------------------------------------------------------------------------------------

    def flat(self) -> Tensor:
        """The slice, in memory: a view, and while there is one the buffer stays. For the current stream. Writes that
        are told by the tensor's version, or by `note_write`, are on the medium later."""
        view = self.come()
        assert self._buffer is not None
        self.store.medium.use(self._buffer)
        return view

    def lend(self) -> Tensor:
        """As `flat`, to somebody outside: it is on the medium anew when the last view is gone, since collectives,
        kernels and writes to `.data` tell no version."""
        view = self.flat()
        self._is_written = True
        return view

    def come(self) -> Tensor:
        """As `flat`, to be held, so that the slice stays, and not to be used."""
        if self.state is not HomeState.HERE:
            self.store.medium.check()
            self.store.make_way()
            if self.state is HomeState.RESTING:
                self._begin_read(self.store.take_buffer())
            self._wait()
            self._move(HomeState.HERE)
        return self._view()

    def _view(self) -> Tensor:
        assert self._bytes is not None
        with torch.inference_mode(False):  # writes to a view of another dtype that is made inside are not counted
            return self._bytes[: self.numel * self.dtype.itemsize].view(self.dtype)

    def begin_anew(self) -> None:
        """It is going to be written whole: begin with zeros, whatever the medium holds."""
        self.claim()
        assert self._bytes is not None
        self._bytes.zero_()

    def claim(self) -> Tensor:
        """As `flat`, to be written whole by the current stream or behind it, whatever the medium holds: nothing is
        read."""
        self.store.make_way()
        if self.state is not HomeState.HERE:
            self.finish()
            self._take(self.store.take_buffer())
            self._move(HomeState.HERE)
        assert self._buffer is not None
        self.store.medium.claim(self._buffer)
        self.note_write()
        return self._view()

    def read_ahead(self) -> None:
        """Begin to read it, if there is a free buffer: it will be wanted soon."""
        if self.state is HomeState.RESTING and (buffer := self.store.take_free_buffer()) is not None:
            self._begin_read(buffer)

    def _begin_read(self, buffer: Tensor) -> None:
        self._take(buffer)
        self._move(HomeState.READING)
        assert self._bytes is not None
        try:
            self._under_way = self.store.medium.read(self.start, self._bytes)
        except BaseException:  # of a disk that has failed before
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
        """For a transfer of the buffer. After an error the slice is at rest; after an interrupt it is still under way,
        and has its buffer."""
        assert self._under_way is not None
        try:
            self._under_way.wait()
        except UsageError:
            self._under_way = None
            self._rest()
            raise
        self._under_way = None

    # Going ------------------------------------------------------------------------------------------------------------

    def note_write(self) -> None:
        """Somebody wrote to it, perhaps in a way that no version tells."""
        self._former_versions += 1
        self._is_written = self._is_written or self.state is HomeState.HERE

    def _references(self) -> int:
        """To the buffer, from tensors."""
        assert self._bytes is not None
        count: int = torch._C._storage_Use_Count(self._bytes.untyped_storage()._cdata)
        return count

    @property
    def is_viewed(self) -> bool:
        """Whether anybody has a view of it."""
        return self._bytes is not None and self._references() > self._own_references

    def leave(self) -> None:
        """The current stream is behind all that was done with it: as `let_go`, at once and not when another is to
        come."""
        if self.state is HomeState.HERE:
            assert self._buffer is not None
            self.store.medium.use(self._buffer)
            self.let_go()

    def let_go(self) -> None:
        """Give the buffer back, now or when it is written; not while anybody has a view of it."""
        if self.state is not HomeState.HERE or self.is_viewed:
            return
        assert self._bytes is not None
        if not self._is_written and self._bytes._version == self._clean_version:
            self._rest()
            return
        self._under_way = self.store.medium.write(self.start, self._bytes)
        self._is_written, self._clean_version = False, self._bytes._version
        self._move(HomeState.WRITING)

    @property
    def is_being_read(self) -> bool:
        """Whether it is on its way to a buffer."""
        return self.state is HomeState.READING

    @property
    def is_being_written(self) -> bool:
        """Whether it is on its way back to the medium."""
        return self.state is HomeState.WRITING

    @property
    def is_written(self) -> bool:
        """Whether a write is over, and the buffer can be had."""
        return self.state is HomeState.WRITING and self._under_way is not None and self._under_way.is_over

    def finish(self) -> None:
        """Wait for a read or write under way, and give the buffer back."""
        if self.state in (HomeState.READING, HomeState.WRITING):
            self._wait()
            self._rest()

    def _rest(self) -> None:
        assert self._bytes is not None
        assert self._buffer is not None
        self._move(HomeState.RESTING)
        self._former_versions += self._bytes._version
        buffer, self._buffer, self._bytes = self._buffer, None, None
        self.store.give_back(self, buffer)

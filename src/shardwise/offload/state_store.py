"""Optimizer state of one rank on a medium, a ring of buffers, and the steps that go through it.

While one portion is computed with, the next ones are read and the last one is written. docs/design/offload.md.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardwise.errors import ConfigError, UsageError, one_line
from shardwise.offload.freed_memory import give_back_freed
from shardwise.offload.medium import Medium, Transfer
from shardwise.offload.portions import BUFFERS, Kept, Portion, portions_of, ring_bytes_for
from shardwise.offload.resting_state import RestingState
from shardwise.offload.shard_store import have_read_ahead
from shardwise.offload.state_room import StateRoom
from shardwise.sharded.parameter import ShardedParameter
from shardwise.sharded.partial_step import step_some

State = dict[ShardedParameter, dict[str, Any]]


class StateStore:
    """Of the units that one call of `sw.shard` made. No communication."""

    def __init__(self, medium: Medium, ring_bytes: int | None) -> None:
        self.medium = medium
        self._asked_bytes = ring_bytes
        self._buffers: list[Tensor] = []
        self._rooms: weakref.WeakKeyDictionary[Optimizer, StateRoom] = weakref.WeakKeyDictionary()
        """Each optimizer has its own."""
        self._taken: weakref.WeakSet[StateRoom] = weakref.WeakSet()
        """Those that there are. What one had that is gone is taken by those that come."""

    @property
    def ring_bytes(self) -> int:
        """Memory that is held where buffers are."""
        return sum(buffer.nbytes for buffer in self._buffers)

    # Room -------------------------------------------------------------------------------------------------------------

    def prepare(self, optimizer: Optimizer) -> None:
        """Take room for state that the optimizer's next step is going to make, before it updates anything.

        Raises UsageError where the medium has no room or the optimizer has come to keep other state, ConfigError for a
        ring that is too small.
        """
        room = self._room_of(optimizer)
        new = room.needs(optimizer, self._keeps)
        if not new:
            return
        ring_bytes = max(self.ring_bytes, ring_bytes_for(self._asked_bytes, new))
        units: dict[Any, list[ShardedParameter]] = {}
        for parameter in new:
            units.setdefault((parameter.unit, parameter.home), []).append(parameter)
        start = max(taken.stop for taken in self._taken)
        portions = portions_of(units.values(), new, ring_bytes // BUFFERS, start)
        self.medium.grow(portions[-1].start + max(portions[-1].nbytes, 1))
        if ring_bytes > self.ring_bytes:
            while self._buffers:
                self.medium.drop(self._buffers.pop())
            self._buffers = self._ring(ring_bytes)
        room.add(portions)

    def _ring(self, nbytes: int) -> list[Tensor]:
        try:
            return [self.medium.buffer(nbytes // BUFFERS) for _ in range(BUFFERS)]
        except (RuntimeError, OSError, OverflowError, TypeError) as error:
            if self._asked_bytes is None:
                raise
            raise ConfigError(
                f"offload.ring_bytes={self._asked_bytes} ({self._asked_bytes // 2**20} MiB): this rank cannot allocate "
                f"a ring of that size ({one_line(error)}); ask for less, or leave it out for the usual size"
            ) from error

    def _room_of(self, optimizer: Optimizer) -> StateRoom:
        room = self._rooms.get(optimizer)
        if room is None:
            room = self._rooms[optimizer] = StateRoom(self.medium)
            self._taken.add(room)
        return room

    def _keeps(self, parameter: Tensor) -> bool:
        return isinstance(parameter, ShardedParameter) and parameter.unit is not None and parameter.unit.states is self

    def place(self, optimizer: Optimizer, parameter: ShardedParameter, name: str) -> RestingState | None:
        """What stands for a state tensor of the parameter; None where no room was taken for it."""
        room = self._rooms[optimizer]
        place = room.place(parameter, name)
        return None if place is None else RestingState(place[1], parameter.device, room, place[0])

    # Failures ---------------------------------------------------------------------------------------------------------

    def check(self, optimizer: Optimizer) -> None:
        """Raise UsageError if the optimizer's state is lost."""
        self._room_of(optimizer).check()

    def has_lost(self, optimizer: Optimizer) -> bool:
        """Whether `check` raises."""
        return self.medium.has_failed or self._room_of(optimizer).is_lost

    @contextmanager
    def written_anew(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, all of the optimizer's state is written. If the medium had failed, that of others is lost."""
        had_failed = self.medium.has_failed
        with self.medium.written_anew():
            yield
        for room in self._taken if had_failed else ():
            room.is_lost = bool(room.portions)
        self._room_of(optimizer).is_lost = False

    # Steps ------------------------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, parameters: Sequence[ShardedParameter]) -> None:
        """Take the optimizer's step for these parameters, which have gradients, and room (`prepare`).

        Raises UsageError, naming the place, for an error of the medium: then some have been updated.
        """
        room = self._rooms[optimizer]
        room.check()
        wanted: dict[Portion, set[ShardedParameter]] = {}
        for parameter in parameters:
            wanted.setdefault(room.portion_of[parameter], set()).add(parameter)
        order = [portion for portion in room.portions if portion in wanted]
        ring = _Ring(self.medium, self._buffers)
        try:
            ahead = iter(order)
            for portion in order:
                while ring.has_free and (coming := next(ahead, None)) is not None:
                    ring.begin_read(coming, self._is_in_store(optimizer, coming))
                    have_read_ahead(coming.parameters)
                is_first = not self._is_in_store(optimizer, portion)
                buffer = ring.wait_for_read()
                self._step_portion(optimizer, portion, wanted[portion], buffer)
                ring.begin_write(portion, buffer)
                if is_first:  # its state was made in memory
                    give_back_freed()
        finally:
            ring.finish()

    def _is_in_store(self, optimizer: Optimizer, portion: Portion) -> bool:
        """Whether any of the portion's state is; a first step has none to read."""
        return any(
            self._is_here(optimizer, parameter, name, value)
            for parameter in portion.parameters
            for name, value in optimizer.state.get(parameter, {}).items()
        )

    def _is_here(self, optimizer: Optimizer, parameter: ShardedParameter, name: str, value: Any) -> bool:
        """Whether a value of the optimizer's state is what lies in its room: not of another optimizer."""
        room = self._rooms[optimizer]
        place = room.place(parameter, name)
        return isinstance(value, RestingState) and value.room is room and place is not None and place[0] == value.start

    def _step_portion(
        self, optimizer: Optimizer, portion: Portion, wanted: set[ShardedParameter], buffer: Tensor
    ) -> None:
        """Step with state in the buffer, and have the buffer hold the new state."""
        views = {key: _view(buffer, *place) for key, place in portion.places.items()}
        state: State = {parameter: {} for parameter in wanted}
        for parameter in wanted:
            for name, value in optimizer.state.get(parameter, {}).items():
                if self._is_here(optimizer, parameter, name, value):
                    state[parameter][name] = ShardedParameter(views[parameter, name], value.placement)
                else:
                    state[parameter][name] = value.in_memory() if isinstance(value, RestingState) else value
        selected = [[p for p in group["params"] if p in wanted] for group in optimizer.param_groups]
        step_some(optimizer, selected, state)
        for parameter in wanted:
            optimizer.state[parameter] = {
                name: self._kept(optimizer, parameter, name, value, views.get((parameter, name)))
                for name, value in state[parameter].items()
            }

    def _kept(
        self, optimizer: Optimizer, parameter: ShardedParameter, name: str, value: Any, view: Tensor | None
    ) -> Any:
        """What stands in the optimizer between steps; the numbers are in the buffer."""
        if not isinstance(value, ShardedParameter):
            return value
        place = self.place(optimizer, parameter, name)
        if place is None or view is None or place.dtype != value.dtype:
            raise UsageError(
                f"the optimizer's step gave {parameter.fqn!r} state {name!r} of {value.dtype} that its first step did "
                f"not: its state cannot be kept {self.medium.where}; leave offload.optimizer out"
            )
        if value.local.numel() and value.local.data_ptr() != view.data_ptr():
            view.copy_(value.local)
        return place


class _Ring:
    """The buffers in one step: free, being read, computed with, or being written."""

    def __init__(self, medium: Medium, buffers: Sequence[Tensor]) -> None:
        self._medium = medium
        self._free = list(buffers)
        self._reads: deque[tuple[Transfer | None, Tensor]] = deque()
        self._writes: deque[tuple[Transfer, Tensor]] = deque()

    @property
    def has_free(self) -> bool:
        """Whether a read can begin; waits for the oldest write where nothing is being read."""
        while self._writes and (self._writes[0][0].is_over or not (self._reads or self._free)):
            writing, buffer = self._writes[0]
            writing.wait()
            self._writes.popleft()  # not before: an interrupt may come
            self._free.append(buffer)
        return bool(self._free)

    def begin_read(self, portion: Portion, is_there: bool) -> None:
        """Read a portion's state, if there is any, into a free buffer."""
        buffer = self._free.pop(0)
        is_read = is_there and portion.nbytes  # a rank may have no elements of it
        self._reads.append((self._medium.read(portion.start, buffer[: portion.nbytes]) if is_read else None, buffer))

    def wait_for_read(self) -> Tensor:
        """The buffer of the oldest read, for the current stream."""
        reading, buffer = self._reads[0]
        if reading is None:
            self._medium.claim(buffer)
        else:
            reading.wait()
            self._medium.use(buffer)
        self._reads.popleft()
        return buffer

    def begin_write(self, portion: Portion, buffer: Tensor) -> None:
        """Write it back, if there is any; then the buffer is free."""
        if not portion.nbytes:
            self._free.append(buffer)
            return
        self._writes.append((self._medium.write(portion.start, buffer[: portion.nbytes]), buffer))

    def finish(self) -> None:
        """Wait for all transfers. Raises UsageError if one failed."""
        with ExitStack() as stack:  # for the others as well
            for transfer, _ in (*self._reads, *self._writes):
                if transfer is not None:
                    stack.callback(transfer.wait)


def _view(buffer: Tensor, offset: int, kept: Kept) -> Tensor:
    return buffer[offset : offset + kept.nbytes].view(kept.dtype)

"""The optimizer state of one rank on a tier, and the optimizer's step through a ring of buffers.

While one portion is updated, the next ones are read and the last one is written. See docs/design/offload.md.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardwise import accelerators
from shardwise.errors import ConfigError, UsageError, one_line
from shardwise.fsdp.sharded_parameter import Owner, ShardedParameter
from shardwise.offload import host_threads
from shardwise.offload.freed_memory import give_back_freed
from shardwise.offload.host_step import HostStep, in_host_memory
from shardwise.offload.offloaded_state import OffloadedState
from shardwise.offload.portions import BUFFERS, Portion, StateLayout, portions_of, ring_bytes_for
from shardwise.offload.shard_store import have_read_ahead
from shardwise.offload.state_allocation import StateAllocation
from shardwise.offload.tiers.tier import Tier, Transfer
from shardwise.sharded.extensions.offloaded import slice_of
from shardwise.sharded.extensions.partial_step import step_some

State = dict[ShardedParameter, dict[str, Any]]


class StateStore:
    """The optimizer state of all units that one `sw.shard` call made. Does not communicate."""

    def __init__(self, tier: Tier, ring_bytes: int | None, host: HostStep | None = None) -> None:
        """`host`: takes the steps, if the host does; the ring is then in host memory."""
        self.tier = tier
        self.owners: weakref.WeakSet[Owner] = weakref.WeakSet()
        """The units whose optimizer state it keeps."""
        self._host = host
        self._asked_bytes = ring_bytes
        self._buffers: list[Tensor] = []
        self._allocations: weakref.WeakKeyDictionary[Optimizer, StateAllocation] = weakref.WeakKeyDictionary()
        """By optimizer: where its state is stored."""
        self._taken: weakref.WeakSet[StateAllocation] = weakref.WeakSet()
        """All live ones, also of optimizers that are gone. New portions go behind the last one, so that the range of a
        freed one at the end is reused."""

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring, in the memory of the processor that takes the steps."""
        return sum(buffer.nbytes for buffer in self._buffers)

    # Space ------------------------------------------------------------------------------------------------------------

    def prepare(self, optimizer: Optimizer) -> None:
        """Allocate space for the state that the optimizer's next step will make. Must be called before that step.

        Raises UsageError if the tier has no space or the optimizer would keep other state than in its first step,
        ConfigError if the ring is too small or cannot be allocated.
        """
        allocation = self._allocation_of(optimizer)
        new = allocation.needs(optimizer, self._stores_state_of)
        if not new:
            return
        ring_bytes = max(self.ring_bytes, ring_bytes_for(self._asked_bytes, new))
        units: dict[Any, list[ShardedParameter]] = {}
        for parameter in new:
            units.setdefault((parameter.unit, slice_of(parameter)), []).append(parameter)
        start = max(taken.stop for taken in self._taken)
        portions = portions_of(units.values(), new, ring_bytes // BUFFERS, start)
        self.tier.grow(portions[-1].start + max(portions[-1].nbytes, 1))
        if ring_bytes > self.ring_bytes:
            while self._buffers:
                self.tier.drop(self._buffers.pop())
            self._buffers = self._ring(ring_bytes)
        allocation.add(portions)

    def _ring(self, nbytes: int) -> list[Tensor]:
        try:
            return [self.tier.buffer(nbytes // BUFFERS) for _ in range(BUFFERS)]
        except (RuntimeError, OSError, OverflowError, TypeError) as error:
            if self._asked_bytes is None:
                raise
            raise ConfigError(
                f"offload.ring_bytes={self._asked_bytes} ({self._asked_bytes // 2**20} MiB): this rank cannot allocate "
                f"a ring of that size ({one_line(error)}); ask for less, or leave it out for the usual size"
            ) from error

    def _allocation_of(self, optimizer: Optimizer) -> StateAllocation:
        allocation = self._allocations.get(optimizer)
        if allocation is None:
            allocation = self._allocations[optimizer] = StateAllocation(self.tier)
            self._taken.add(allocation)
        return allocation

    def _stores_state_of(self, parameter: Tensor) -> bool:
        return isinstance(parameter, ShardedParameter) and parameter.unit in self.owners

    def place(self, optimizer: Optimizer, parameter: ShardedParameter, name: str) -> OffloadedState | None:
        """Return the stand-in for a state tensor of the parameter, or None if it has no place."""
        allocation = self._allocations[optimizer]
        place = allocation.place(parameter, name)
        device = parameter.device if self._host is None else accelerators.CPU
        return None if place is None else OffloadedState(place[1], device, allocation, place[0])

    # Failures ---------------------------------------------------------------------------------------------------------

    def check(self, optimizer: Optimizer) -> None:
        """Raise UsageError if the optimizer's state is lost."""
        self._allocation_of(optimizer).check()

    def has_lost(self, optimizer: Optimizer) -> bool:
        """Whether `check` raises."""
        return self.tier.has_failed or self._allocation_of(optimizer).is_lost

    @contextmanager
    def written_anew(self, optimizer: Optimizer) -> Iterator[None]:
        """Return a context in which the caller writes all of the optimizer's state.

        If it succeeds, this state is valid again; if the tier had failed, the state of other optimizers is lost.
        """
        had_failed = self.tier.has_failed
        with self.tier.written_anew():
            yield
        for allocation in self._taken if had_failed else ():
            allocation.is_lost = bool(allocation.portions)
        self._allocation_of(optimizer).is_lost = False

    # Steps ------------------------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, parameters: Sequence[ShardedParameter]) -> None:
        """Take the optimizer's step for these parameters, which must have gradients and places (`prepare`).

        Raises UsageError, naming the place, if the tier fails. Some parameters may have been updated then.
        """
        allocation = self._allocations[optimizer]
        allocation.check()
        wanted: dict[Portion, set[ShardedParameter]] = {}
        for parameter in parameters:
            wanted.setdefault(allocation.portion_of[parameter], set()).add(parameter)
        order = [portion for portion in allocation.portions if portion in wanted]
        ring = _Ring(self.tier, self._buffers)
        try:
            ahead = iter(order)
            for portion in order:
                while ring.has_free and (coming := next(ahead, None)) is not None:
                    ring.begin_read(coming, self._is_in_store(optimizer, coming))
                    if self._host is None:
                        have_read_ahead(coming.parameters)
                is_first = not self._is_in_store(optimizer, portion)
                buffer = ring.wait_for_read()
                self._step_portion(optimizer, portion, wanted[portion], buffer)
                ring.begin_write(portion, buffer)
                if is_first:  # its state was made outside the ring
                    give_back_freed()
        finally:
            try:
                ring.finish()
            finally:  # also if the disk has failed
                if self._host is not None:
                    self._host.finish()

    def _is_in_store(self, optimizer: Optimizer, portion: Portion) -> bool:
        """Whether any of the portion's state is in this store. Before a first step there is none to read."""
        return any(
            self._is_here(optimizer, parameter, name, value)
            for parameter in portion.parameters
            for name, value in optimizer.state.get(parameter, {}).items()
        )

    def _is_here(self, optimizer: Optimizer, parameter: ShardedParameter, name: str, value: Any) -> bool:
        """Whether a value in `optimizer.state` stands for what is stored for this optimizer at that place."""
        allocation = self._allocations[optimizer]
        place = allocation.place(parameter, name)
        return (
            isinstance(value, OffloadedState)
            and value.allocation is allocation
            and place is not None
            and place[0] == value.start
        )

    def _step_portion(
        self, optimizer: Optimizer, portion: Portion, wanted: set[ShardedParameter], buffer: Tensor
    ) -> None:
        """Take the step with the state in the buffer, and leave the new state in the buffer."""
        views = {key: _view(buffer, *place) for key, place in portion.places.items()}
        state: State = {parameter: {} for parameter in wanted}
        for parameter in wanted:
            for name, value in optimizer.state.get(parameter, {}).items():
                if self._is_here(optimizer, parameter, name, value):
                    state[parameter][name] = ShardedParameter(views[parameter, name], value.placement)
                else:
                    state[parameter][name] = value.in_memory() if isinstance(value, OffloadedState) else value
        if self._host is None:
            selected = [[p for p in group["params"] if p in wanted] for group in optimizer.param_groups]
            step_some(optimizer, selected, state)
        else:
            state = {parameter: in_host_memory(values) for parameter, values in state.items()}  # if it was loaded
            parameters = list(wanted)
            self._host.copy_to_host(parameters)
            self._host.step_some(optimizer, parameters, state)
        with nullcontext() if self._host is None else host_threads.on_host():
            for parameter in wanted:
                optimizer.state[parameter] = {
                    name: self._store_value(optimizer, parameter, name, value, views.get((parameter, name)))
                    for name, value in state[parameter].items()
                }

    def _store_value(
        self, optimizer: Optimizer, parameter: ShardedParameter, name: str, value: Any, view: Tensor | None
    ) -> Any:
        """Copy a new state tensor to the buffer if it is not there, and return what stands for it between steps.

        Values that are not sharded tensors, such as counters, are returned as they are.
        """
        if not isinstance(value, ShardedParameter):
            return value
        place = self.place(optimizer, parameter, name)
        if place is None or view is None or place.dtype != value.dtype:
            raise UsageError(
                f"the optimizer's step made state {name!r} of {value.dtype} for {parameter.fqn!r}, which its first "
                f"step did not make, so it cannot be kept {self.tier.where}: leave offload.optimizer out"
            )
        if value.local.numel() and value.local.data_ptr() != view.data_ptr():
            view.copy_(value.local)
        return place


class _Ring:
    """The ring's buffers during one step: free, being read, computed with, or being written."""

    def __init__(self, tier: Tier, buffers: Sequence[Tensor]) -> None:
        self._tier = tier
        self._free = list(buffers)
        self._reads: deque[tuple[Transfer | None, Tensor]] = deque()
        self._writes: deque[tuple[Transfer, Tensor]] = deque()

    @property
    def has_free(self) -> bool:
        """Whether a read can begin. Waits for the oldest write if no buffer is free and nothing is being read."""
        while self._writes and (self._writes[0][0].is_over or not (self._reads or self._free)):
            writing, buffer = self._writes[0]
            writing.wait()
            self._writes.popleft()  # only now: an interrupt may come while it waits
            self._free.append(buffer)
        return bool(self._free)

    def begin_read(self, portion: Portion, is_there: bool) -> None:
        """Begin to read a portion's state, if there is any, into a free buffer."""
        buffer = self._free.pop(0)
        is_read = is_there and portion.nbytes  # a rank may have no elements of the portion
        self._reads.append((self._tier.read(portion.start, buffer[: portion.nbytes]) if is_read else None, buffer))

    def wait_for_read(self) -> Tensor:
        """Wait for the oldest read and return its buffer, for use on the current stream."""
        reading, buffer = self._reads[0]
        if reading is None:
            self._tier.claim(buffer)
        else:
            reading.wait()
            self._tier.use(buffer)
        self._reads.popleft()
        return buffer

    def begin_write(self, portion: Portion, buffer: Tensor) -> None:
        """Begin to write a portion's state back. A buffer without any state is free at once."""
        if not portion.nbytes:
            self._free.append(buffer)
            return
        self._writes.append((self._tier.write(portion.start, buffer[: portion.nbytes]), buffer))

    def finish(self) -> None:
        """Wait for all transfers. Raises UsageError if one failed."""
        with ExitStack() as stack:  # waits for all, also if one raises
            for transfer, _ in (*self._reads, *self._writes):
                if transfer is not None:
                    stack.callback(transfer.wait)


def _view(buffer: Tensor, offset: int, layout: StateLayout) -> Tensor:
    return buffer[offset : offset + layout.nbytes].view(layout.dtype)

"""The optimizer state of one rank on disk: a file, a ring of buffers, and the steps that go through it.

While one portion is computed with, the next ones are read and the last one is written. docs/design/offload.md.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.errors import UsageError
from shardwise.files.direct import huge_page_buffer
from shardwise.files.scratch_file import ScratchFile
from shardwise.files.thread_pool import ThreadPool
from shardwise.offload.portions import BUFFERS, Dtypes, Portion, portions_of, probe, ring_bytes_for
from shardwise.offload.state_on_disk import StateOnDisk
from shardwise.sharded.parameter import ShardedParameter
from shardwise.sharded.partial_step import by_owner, step_some

State = dict[ShardedParameter, dict[str, Any]]


class StateStore:
    """Of the units that one call of `sw.shard` made. No communication."""

    def __init__(self, directory: Path, ring_bytes: int | None) -> None:
        self.directory = directory
        self._asked_bytes = ring_bytes
        self._file: ScratchFile | None = None
        self._ring: memoryview | None = None
        self._portions: list[Portion] = []
        self._portion_of: dict[ShardedParameter, Portion] = {}
        self._failure: OSError | None = None

    @property
    def ring_bytes(self) -> int:
        """Host memory that is held."""
        return 0 if self._ring is None else self._ring.nbytes

    @property
    def file_bytes(self) -> int:
        """Taken on disk."""
        return 0 if self._file is None else self._file.nbytes

    def check(self) -> None:
        """Raise UsageError if the file could not be read or written before."""
        if self._failure is not None:
            raise UsageError(
                f"the optimizer's state in {self.directory} is lost since it could not be read or written "
                f"({self._failure}): weights and state are of different steps. Load the last checkpoint with "
                "sw.checkpoint.load(path, model, optimizer)"
            ) from self._failure

    def forgive(self) -> None:
        """All weights and state are about to be loaded."""
        self._failure = None

    # Room -------------------------------------------------------------------------------------------------------------

    def prepare(self, optimizer: Optimizer) -> None:
        """Take room for state that the optimizer's step is going to make, before it updates anything.

        Raises UsageError where the disk has no room, ConfigError for too small a ring.
        """
        new: dict[ShardedParameter, Dtypes] = {}
        probed: dict[tuple[int, torch.dtype], Dtypes] = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if self._keeps(parameter) and parameter not in self._portion_of:
                    kind = number, parameter.local.dtype
                    if kind not in probed:
                        probed[kind] = probe(optimizer, *kind)
                    new[parameter] = probed[kind]
        self.make_room(new)

    def make_room(self, new: Mapping[ShardedParameter, Dtypes]) -> None:
        """Take room for state of parameters that have none yet, of these names and dtypes. Raises as `prepare`."""
        new = {parameter: dtypes for parameter, dtypes in new.items() if parameter not in self._portion_of}
        if not new:
            return
        ring_bytes = max(self.ring_bytes, ring_bytes_for(self._asked_bytes, new))
        units: dict[Any, list[ShardedParameter]] = {}
        for parameter in new:
            units.setdefault(parameter.unit, []).append(parameter)
        portions = portions_of(units.values(), new, ring_bytes // BUFFERS, self.file_bytes)
        try:
            if self._file is None:
                self._file = ScratchFile(self.directory)
                weakref.finalize(self, self._file.close)
            self._file.grow(portions[-1].start + max(portions[-1].nbytes, 1))
        except OSError as error:
            need = sum(portion.nbytes for portion in portions)
            raise UsageError(
                f"offload: {self.directory} has no room for {need} bytes of this rank's optimizer state ({error}): "
                "free some, or set offload.path to another disk"
            ) from error
        if ring_bytes > self.ring_bytes:
            self._ring = huge_page_buffer(ring_bytes)
        self._portions += portions
        self._portion_of.update({parameter: portion for portion in portions for parameter in portion.parameters})

    def _keeps(self, parameter: Tensor) -> bool:
        return isinstance(parameter, ShardedParameter) and parameter.unit is not None and parameter.unit.states is self

    def place(self, parameter: ShardedParameter, name: str) -> StateOnDisk | None:
        """What stands for a state tensor of the parameter; None where no room was taken for it."""
        portion = self._portion_of.get(parameter)
        if portion is None or (parameter, name) not in portion.places:
            return None
        offset, dtype = portion.places[parameter, name]
        return StateOnDisk(parameter, dtype, self, portion.start + offset)

    # Steps ------------------------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, parameters: Sequence[ShardedParameter]) -> None:
        """Take the optimizer's step for these parameters, which have gradients.

        Raises UsageError, naming the directory, for an error of the disk: then some have been updated.
        """
        self.check()
        self.prepare(optimizer)
        wanted: dict[Portion, set[ShardedParameter]] = {}
        for parameter in parameters:
            wanted.setdefault(self._portion_of[parameter], set()).add(parameter)
        order = [portion for portion in self._portions if portion in wanted]
        with self._failing(), ThreadPool(BUFFERS - 1) as pool:
            ring = _Ring(self._open_file(), self._buffers(), pool)
            ahead = iter(order)
            for portion in order:
                while ring.has_free and (coming := next(ahead, None)) is not None:
                    ring.begin_read(coming, _is_in_file(optimizer, coming))
                buffer = ring.wait_for_read()
                self._step_portion(optimizer, portion, wanted[portion], buffer)
                ring.begin_write(portion, buffer)
            ring.finish()

    def _step_portion(
        self, optimizer: Optimizer, portion: Portion, wanted: set[ShardedParameter], buffer: memoryview
    ) -> None:
        """Step with state in the buffer, and have the buffer hold the new state."""
        views = {key: _view(buffer, key[0], *place) for key, place in portion.places.items()}
        state: State = {parameter: {} for parameter in wanted}
        for parameter in wanted:
            for name, value in optimizer.state.get(parameter, {}).items():
                in_file = isinstance(value, StateOnDisk)
                state[parameter][name] = (
                    ShardedParameter(views[parameter, name], parameter.placement) if in_file else value
                )
        selected = [[p for p in group["params"] if p in wanted] for group in optimizer.param_groups]
        step_some(optimizer, selected, state)
        for parameter in wanted:
            optimizer.state[parameter] = {
                name: self._kept(parameter, name, value, views.get((parameter, name)))
                for name, value in state[parameter].items()
            }

    def _kept(self, parameter: ShardedParameter, name: str, value: Any, view: Tensor | None) -> Any:
        """What stands in the optimizer between steps; the numbers are in the buffer."""
        if not isinstance(value, ShardedParameter):
            return value
        place = self.place(parameter, name)
        if place is None or view is None or place.dtype != value.dtype:
            raise UsageError(
                f"the optimizer's step gave {parameter.fqn!r} state {name!r} of {value.dtype} that its first step did "
                "not: its state cannot be kept on disk; leave offload.optimizer out"
            )
        if value.local.numel() and value.local.data_ptr() != view.data_ptr():
            view.copy_(value.local)
        return place

    def _buffers(self) -> list[memoryview]:
        assert self._ring is not None
        step = self._ring.nbytes // BUFFERS
        return [self._ring[i * step : (i + 1) * step] for i in range(BUFFERS)]

    def _open_file(self) -> ScratchFile:
        assert self._file is not None
        return self._file

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Note an error of the disk, and raise it as every later call will."""
        try:
            yield
        except (OSError, EOFError) as error:
            self._failure = error if isinstance(error, OSError) else OSError(f"the file ends at byte {error}")
            self.check()

    # Reading and writing between steps --------------------------------------------------------------------------------

    def read_into(self, start: int, piece: Tensor) -> None:
        """Fill a plain 1-D tensor from byte `start` of the file. Raises UsageError."""
        self.check()
        if piece.numel():
            with self._failing():
                self._open_file().read_some(start, piece.view(torch.uint8).numpy().data)

    def write_from(self, start: int, piece: Tensor) -> None:
        """Likewise write; on disk after `settle`."""
        self.check()
        if piece.numel():
            with self._failing():
                self._open_file().write_some(start, piece.view(torch.uint8).numpy().data)

    def settle(self) -> None:
        """Have everything on disk that `write_from` wrote."""
        if self._file is not None:
            with self._failing():
                self._file.settle()


class _Ring:
    """The buffers in one step: free, being read, computed with, or being written."""

    def __init__(self, file: ScratchFile, buffers: list[memoryview], pool: ThreadPool) -> None:
        self._file, self._pool = file, pool
        self._free = buffers
        self._reads: deque[tuple[Future[Any] | None, memoryview]] = deque()
        self._writes: deque[tuple[Future[Any], memoryview]] = deque()

    @property
    def has_free(self) -> bool:
        """Whether a read can begin; waits for the oldest write where nothing is being read."""
        while self._writes and (self._writes[0][0].done() or not (self._reads or self._free)):
            writing, buffer = self._writes.popleft()
            writing.result()
            self._free.append(buffer)
        return bool(self._free)

    def begin_read(self, portion: Portion, is_there: bool) -> None:
        """Read a portion's state, if there is any, into a free buffer."""
        buffer = self._free.pop()
        reading = self._pool.submit(self._file.read, portion.start, buffer[: portion.nbytes]) if is_there else None
        self._reads.append((reading, buffer))

    def wait_for_read(self) -> memoryview:
        """The buffer of the oldest read."""
        reading, buffer = self._reads.popleft()
        if reading is not None:
            reading.result()
        return buffer

    def begin_write(self, portion: Portion, buffer: memoryview) -> None:
        """Write it back; then the buffer is free."""
        self._writes.append((self._pool.submit(self._file.write, portion.start, buffer[: portion.nbytes]), buffer))

    def finish(self) -> None:
        """Wait for all writes."""
        while self._writes:
            self._writes.popleft()[0].result()


def _is_in_file(optimizer: Optimizer, portion: Portion) -> bool:
    """Whether any of the portion's state is; a first step has none to read."""
    return any(
        isinstance(value, StateOnDisk)
        for parameter in portion.parameters
        for value in optimizer.state.get(parameter, {}).values()
    )


def _view(buffer: memoryview, parameter: ShardedParameter, offset: int, dtype: torch.dtype) -> Tensor:
    numel = parameter.fragment.numel
    return torch.frombuffer(buffer, dtype=dtype, count=numel, offset=offset) if numel else torch.empty(0, dtype=dtype)


def step_with_stores(optimizer: Optimizer, selected: Sequence[Sequence[Tensor]]) -> None:
    """The optimizer's step for some of its parameters, each with its state where that is kept. No communication."""
    in_memory: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
    stored: dict[StateStore, list[ShardedParameter]] = {}
    for number, some in enumerate(selected):
        for parameter in some:
            store = store_of(parameter)
            if store is None:
                in_memory[number].append(parameter)
            elif parameter.grad is not None:
                assert isinstance(parameter, ShardedParameter)
                stored.setdefault(store, []).append(parameter)
    for store in stores_of(optimizer):
        store.check()
        store.prepare(optimizer)
    if any(in_memory):
        step_some(optimizer, in_memory)
    for store, parameters in stored.items():
        store.step(optimizer, parameters)


def store_of(parameter: Tensor) -> StateStore | None:
    """What keeps the state of the parameter on disk."""
    unit = parameter.unit if isinstance(parameter, ShardedParameter) else None
    return None if unit is None else unit.states


def stores_of(optimizer: Optimizer) -> list[StateStore]:
    """All that keep state of its parameters."""
    units = by_owner(optimizer)
    return list(dict.fromkeys(unit.states for unit in units if unit is not None and unit.states is not None))

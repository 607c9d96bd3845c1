"""A device's streams and events played on CPU ranks, so that their order is checked without one.

    with played() as order:                  # streams and events are those below; models get StreamCollectives
        Twins().train()
    assert not order.races

Work really runs at once, in program order, over gloo. Beside that, every operation is entered under the stream it would
have been enqueued on, with the bytes that it reads and writes. Two accesses to one byte, one of them a write, race
unless events order them: the later one's stream must have waited, directly or through others, for the earlier one
(vector clocks, as torch's own CUDA sanitizer has them, but by ranges of bytes instead of first addresses).
Memory that is given back while another stream than its allocator's may still use it is a race too: the allocator hands
it out again at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from shardwise import accelerators
from shardwise.comm.backends import on_streams
from shardwise.engine import mesh as mesh_module
from shardwise.sharded.parameter import ShardedParameter

# While models play, those of `torch.distributed` are watched.
_all_reduce = dist.all_reduce
_all_to_all = dist.all_to_all_single

Clock = dict[int, int]
"""For each stream, by number: up to which of its accesses one has waited."""


def merge(clock: Clock, other: Clock) -> None:
    for stream, last in other.items():
        clock[stream] = max(clock.get(stream, 0), last)


class Event:
    """Everything that is before one moment of a stream."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock


class Stream:
    """What `torch.Stream` does to order, and nothing else."""

    made = 0

    def __init__(self, device: Any = None) -> None:
        Stream.made += 1
        self.number = Stream.made
        self.device = device
        self.device_index = 0
        self.clock: Clock = {}

    def wait_event(self, event: Event) -> None:
        merge(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        merge(self.clock, other.clock)

    def record_event(self) -> Event:
        return Event(dict(self.clock))


@dataclass(frozen=True)
class Access:
    """One operation's use of a range of bytes of one storage."""

    stream: Stream
    time: int
    first: int
    end: int
    writes: bool
    what: str

    def is_before(self, stream: Stream) -> bool:
        return stream.clock.get(self.stream.number, 0) >= self.time

    def meets(self, other: Access) -> bool:
        return self.first < other.end and other.first < self.end and (self.writes or other.writes)

    def __str__(self) -> str:
        return f"{self.what} {'writes' if self.writes else 'reads'} on stream {self.stream.number}"


class Order(TorchDispatchMode):
    """Sees every operation and keeps what each storage's bytes were last used for."""

    def __init__(self) -> None:
        super().__init__()
        self.current = Stream()
        self.races: list[str] = []
        self.operations: dict[int, int] = {}
        """How many were entered, by stream."""
        self._home: dict[int, Stream] = {}
        self._accesses: dict[int, list[Access]] = {}
        self._watches: dict[int, weakref.finalize[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        arguments = list(zip(func._schema.arguments, args, strict=False))
        arguments += [(a, kwargs[a.name]) for a in func._schema.arguments if kwargs and a.name in kwargs]
        written = [value for argument, value in arguments if argument.alias_info and argument.alias_info.is_write]
        is_view = any(a.alias_info and not a.alias_info.is_write for a, _ in arguments)
        self.enter(
            func.__name__, [] if is_view else [value for _, value in arguments], [written, [] if is_view else out]
        )
        return out

    def enter(self, what: str, read: Any, written: Any) -> None:
        """An operation on the current stream uses memory."""
        stream = self.current
        self.operations[stream.number] = self.operations.get(stream.number, 0) + 1
        time = stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        of_written = [_range(tensor) for tensor in _tensors(written)]
        for tensor in _tensors(read):
            if _range(tensor) not in of_written:
                self._use(tensor, time, what, writes=False)
        for tensor in _tensors(written):
            self._use(tensor, time, what, writes=True)

    def _use(self, tensor: Tensor, time: int, what: str, writes: bool) -> None:
        storage, first, end = _range(tensor)
        if first == end:
            return
        if storage not in self._accesses:
            self._accesses[storage] = []
            self._home[storage] = self.current
            self._watches[storage] = weakref.finalize(tensor.untyped_storage(), self._freed, storage)
        access = Access(self.current, time, first, end, writes, what)
        kept = []
        for former in self._accesses[storage]:
            if former.meets(access) and not former.is_before(self.current):
                self.races.append(f"{access}, but nothing orders it after: {former}")
            covered = first <= former.first and former.end <= end and former.is_before(self.current)
            if not (covered and (writes or not former.writes)):
                kept.append(former)
        self._accesses[storage] = [*kept, access]

    def _freed(self, storage: int) -> None:
        home = self._home.pop(storage)
        del self._watches[storage]
        for access in self._accesses.pop(storage):
            if not access.is_before(home):
                self.races.append(
                    f"memory of stream {home.number} is given back, but nothing orders that after: {access}"
                )

    def __exit__(self, *exception: object) -> None:
        for watch in self._watches.values():
            watch.detach()
        super().__exit__(*exception)

    # What stands for a device and c10d --------------------------------------------------------------------------

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    def all_gather(self, whole: Tensor, own: Tensor, group: Any) -> None:
        self.enter("all_gather", [], [whole])  # in place: the own slice is read and stays
        with _disable_current_modes():
            dist.all_gather_into_tensor(whole, own.clone(), group=group)

    def reduce_scatter(self, own: Tensor, whole: Tensor, op: Any, group: Any) -> None:
        self.enter("reduce_scatter", [whole], [own])
        with _disable_current_modes():
            terms = whole.clone()
            _all_reduce(terms, op, group=group)
            own.copy_(terms.chunk(group.size())[group.rank()])

    def all_to_all(self, into: Tensor, sent: Tensor, received: list[int], sizes: list[int], group: Any) -> None:
        self.enter("all_to_all", [sent], [into])
        with _disable_current_modes():
            _all_to_all(into, sent.clone(), received, sizes, group=group)

    def all_reduce(self, tensor: Tensor, op: Any, group: Any) -> None:
        self.enter("all_reduce", [], [tensor])
        with _disable_current_modes():
            _all_reduce(tensor, op, group=group)


def _tensors(tree: Any) -> list[Tensor]:
    leaves = [leaf.local if isinstance(leaf, ShardedParameter) else leaf for leaf in tree_leaves(tree)]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _range(tensor: Tensor) -> tuple[int, int, int]:
    """Its storage, and the first byte and the end of what it spans there."""
    storage = tensor.untyped_storage()._cdata
    if tensor.numel() == 0:
        return storage, 0, 0
    first = tensor.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return storage, first * tensor.itemsize, (last + 1) * tensor.itemsize


@contextmanager
def played(**options: Any) -> Iterator[Order]:
    """Inside, models on CPU ranks are sharded over StreamCollectives, with `options`. Every rank must call this."""
    order = Order()

    class Played(on_streams.StreamCollectives):
        @staticmethod
        @contextmanager
        def _together(group: dist.ProcessGroup, count: int) -> Iterator[None]:
            yield

        def broadcast(self, tensor: Tensor, src: int) -> None:
            order.enter("broadcast", [], [tensor])
            with _disable_current_modes():
                super().broadcast(tensor, src)

        def barrier(self) -> None:
            dist.barrier(self._group)

    def collectives_for(group: dist.ProcessGroup | None, device: torch.device) -> Played:
        return Played(group or dist.group.WORLD, device, **options)

    with (
        mock.patch.object(mesh_module, "collectives_for", collectives_for),
        mock.patch.object(on_streams, "_all_gather", order.all_gather),
        mock.patch.object(on_streams, "_reduce_scatter", order.reduce_scatter),
        mock.patch.object(on_streams.dist, "all_reduce", order.all_reduce),
        mock.patch.object(on_streams.dist, "all_to_all_single", order.all_to_all),
        mock.patch.object(accelerators, "new_stream", Stream),
        mock.patch.object(accelerators, "on", order.stream),
        mock.patch.object(accelerators, "current_stream", order.current_stream),
        mock.patch.object(accelerators, "has_memory", return_value=True),
        order,
    ):
        yield order

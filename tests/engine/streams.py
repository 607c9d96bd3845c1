"""Simulated streams and events of a device on CPU ranks, to check the order of accesses to memory without a device.

    with played() as order:                  # streams and events are those below; models get StreamCollectives
        Twins().train()
    assert not order.races

Work really runs at once, in program order, over gloo. In addition, every operation is recorded on the stream that it
would have been enqueued on, with the bytes that it reads and writes. Two accesses to one byte, one of them a write,
race unless events order them: the later one's stream must have waited, directly or through others, for the earlier one
(vector clocks, like those of torch's own CUDA sanitizer, but for ranges of bytes instead of first addresses). Memory
that is freed while a stream other than its allocator's may still use it is a race too, because the allocator reuses it
at once.

Threads of a disk (`offload.tiers.disk`) are simulated as well. Each task's accesses to memory and to a file are
recorded on a stream of its own. They come after everything that the submitting thread knew to be complete, and after
the events that the task waited for. A thread that asks for the task's result then knows it to be complete, and
operations that this thread enqueues later are ordered after it. `waits` has a stack for each time that the training
thread waited for the device.
"""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shardwise import accelerators, device_tools
from shardwise.comm.torch_channels import ChannelStreams
from shardwise.files.scratch_file import ScratchFile
from shardwise.files.thread_pool import ThreadPool
from shardwise.fsdp import mesh as mesh_module
from shardwise.fsdp import torch_collectives as on_streams
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.offload import host_threads
from shardwise.offload.tiers import disk as disk_module
from tests.device import skip_beside_one

# Inside `played`, the functions of `torch.distributed` are replaced by watched ones.
_all_reduce = dist.all_reduce
_all_to_all = dist.all_to_all_single

Clock = dict[int, int]
"""By number of a stream, the last of its accesses that has been waited for."""


def merge(clock: Clock, other: Clock) -> None:
    for stream, last in other.items():
        clock[stream] = max(clock.get(stream, 0), last)


class Event:
    """An event, with the clock of its stream when it was recorded."""

    order: ClassVar[Order]
    """The current Order."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def query(self) -> bool:
        self.order.waited(self.clock)
        return True

    def synchronize(self) -> None:
        self.order.waited(self.clock)


class Stream:
    """The part of `torch.Stream` that affects order, and nothing else."""

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
    """An operation's access to a range of bytes of one storage."""

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
    """A dispatch mode that sees every operation, keeps the last accesses to each storage, and lists races."""

    def __init__(self) -> None:
        super().__init__()
        self.current = Stream()
        self.races: list[str] = []
        self.operations: dict[int, int] = {}
        """Number of recorded operations, by stream."""
        self.waits: list[str] = []
        self._home: dict[int, Stream | None] = {}
        """By storage, the stream of its allocator; None for host memory."""
        self._accesses: dict[int, list[Access]] = {}
        self._watches: dict[int, weakref.finalize[Any, Any]] = {}
        self._at: dict[int, int] = {}
        """By address of host memory that threads use, its storage."""
        self._main = Stream()
        self._here = threading.local()
        self._entering = threading.RLock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sharded = [kind for kind in types if issubclass(kind, ShardedParameter)]
        if sharded:  # record what it does with pieces, without loading offloaded ones just to record
            with _Inside(self):
                return max(sharded, key=lambda kind: len(kind.__mro__)).__torch_dispatch__(func, types, args, kwargs)
        out = func(*args, **(kwargs or {}))
        arguments = list(zip(func._schema.arguments, args, strict=False))
        arguments += [(a, kwargs[a.name]) for a in func._schema.arguments if kwargs and a.name in kwargs]
        written = [value for argument, value in arguments if argument.alias_info and argument.alias_info.is_write]
        is_view = any(a.alias_info and not a.alias_info.is_write for a, _ in arguments) and _share(out, args)
        self.enter(
            func.__name__, [] if is_view else [value for _, value in arguments], [written, [] if is_view else out]
        )
        return out

    def enter(self, what: str, read: Any, written: Any) -> None:
        """Record an operation on the current stream, with the tensors that it reads and writes."""
        stream = self.current
        with self._entering:
            merge(stream.clock, self.host.clock)
            time = self._tick(stream)
            of_written = [_range(tensor) for tensor in _tensors(written)]
            for tensor in _tensors(read):
                if _range(tensor) not in of_written:
                    self._use(tensor, time, what, writes=False)
            for tensor in _tensors(written):
                self._use(tensor, time, what, writes=True)

    def _tick(self, stream: Stream) -> int:
        self.operations[stream.number] = self.operations.get(stream.number, 0) + 1
        time = stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        return time

    def _use(self, tensor: Tensor, time: int, what: str, writes: bool) -> None:
        storage, first, end = _range(tensor)
        if first == end:
            return
        self._watch(storage, tensor, self.current)
        self._enter(storage, Access(self.current, time, first, end, writes, what))

    def _watch(self, storage: int, tensor: Tensor, home: Stream | None) -> None:
        if storage not in self._watches:
            self._accesses[storage] = []
            self._home[storage] = home
            self._watches[storage] = weakref.finalize(tensor.untyped_storage(), self._freed, storage)

    def _enter(self, storage: int, access: Access) -> None:
        kept = []
        for former in self._accesses[storage]:
            if former.meets(access) and not former.is_before(access.stream):
                self.races.append(f"{access}, but nothing orders it after: {former}")
            covered = access.first <= former.first and former.end <= access.end and former.is_before(access.stream)
            if not (covered and (access.writes or not former.writes)):
                kept.append(former)
        self._accesses[storage] = [*kept, access]

    def _freed(self, storage: int) -> None:
        home = self._home.pop(storage) or self.host
        del self._watches[storage]
        for access in self._accesses.pop(storage):
            if not access.is_before(home) and not access.is_before(self.host):
                self.races.append(
                    f"memory of stream {home.number} is given back, but nothing orders that after: {access}"
                )

    def __exit__(self, *exception: object) -> None:
        for watch in [*self._watches.values()]:  # a disk's thread may add one meanwhile
            watch.detach()
        super().__exit__(*exception)

    # The host and threads of a disk -----------------------------------------------------------------------------

    @property
    def host(self) -> Stream:
        """The stream that stands for this thread: what it does itself, and what it knows to be complete."""
        found: Stream = getattr(self._here, "stream", self._main)
        return found

    def waited(self, clock: Clock) -> None:
        """Record that this thread has waited for the device, and so knows everything in the clock to be complete."""
        merge(self.host.clock, clock)
        if self.host is self._main:
            self.waits.append("".join(traceback.format_stack(limit=6)[:-1]))

    def wait(self, device: Any) -> None:
        self.waited(dict(self.operations))

    def on_thread(self, stream: Stream, function: Callable[[], object]) -> object:
        self._here.stream = stream
        try:
            return function()
        finally:
            del self._here.stream

    def know(self, tensor: Tensor) -> Tensor:
        """Register host memory that threads will use, and return it."""
        storage = tensor.untyped_storage()._cdata
        self._at[tensor.data_ptr()] = storage
        with self._entering:
            self._watch(storage, tensor, None)
        return tensor

    def transfer(self, file: ScratchFile, start: int, data: memoryview, what: str) -> None:
        """Record that this thread reads a range of a file into memory, or writes it from there."""
        with self._entering:
            time, reads = self._tick(self.host), what.startswith("read")
            self._accesses.setdefault(-id(file), [])
            self._enter(
                -id(file), Access(self.host, time, start, start + data.nbytes, not reads, f"{what} in the file")
            )
            storage = self._at.get(np.frombuffer(data, dtype=np.uint8).ctypes.data)
            if storage in self._watches:
                self._enter(storage, Access(self.host, time, 0, data.nbytes, reads, what))

    @contextmanager
    def on_host(self) -> Iterator[None]:
        with self.stream(self.host):
            yield

    def sent(self, host: Tensor, device: Any) -> Tensor:
        """Copy to the device. Pinned memory is kept until the copy is over."""
        copy = host.clone()
        merge(self.host.clock, self.current.clock)
        return copy

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
            own.data.copy_(terms.chunk(group.size())[group.rank()])  # `.data`: backends do not bump versions

    def all_to_all(self, into: Tensor, sent: Tensor, received: list[int], sizes: list[int], group: Any) -> None:
        self.enter("all_to_all", [sent], [into])
        with _disable_current_modes():
            _all_to_all(into, sent.clone(), received, sizes, group=group)

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        self.enter("all_reduce", [], [tensor])
        with _disable_current_modes():
            _all_reduce(tensor, op, group=group)


class _Inside(TorchDispatchMode):
    """A dispatch mode that passes the operations inside an operation of sharded tensors to an Order."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._order.__torch_dispatch__(func, types, args, kwargs)


class Known:
    """The future of a task on a thread. A thread that gets its result knows the task to be complete. If it is `slow`,
    `done` is False until somebody has waited for the result."""

    def __init__(self, future: Any, stream: Stream, order: Order, slow: bool) -> None:
        self._future, self._stream, self._order, self._slow = future, stream, order, slow

    def done(self) -> bool:
        is_done: bool = self._future.done() and not self._slow
        if is_done:
            merge(self._order.host.clock, self._stream.clock)
        return is_done

    def result(self) -> object:
        try:
            return self._future.result()
        finally:
            self._over()

    def exception(self) -> object:
        try:
            return self._future.exception()
        finally:
            self._over()

    def _over(self) -> None:
        if self._future.done():
            self._slow = False
            merge(self._order.host.clock, self._stream.clock)


@contextmanager
def _threads(order: Order, slow: bool) -> Iterator[None]:
    """Simulate the threads of disks inside the block."""

    class Pool(ThreadPool):
        def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
            stream = Stream()
            merge(stream.clock, order.host.clock)
            future = super().submit(order.on_thread, stream, partial(function, *arguments))
            return Known(future, stream, order, slow)

    def watched(name: str) -> Any:
        whole = getattr(ScratchFile, name)

        def play(self: ScratchFile, start: int, data: memoryview) -> None:
            order.transfer(self, start, data, name)
            whole(self, start, data)

        return mock.patch.object(ScratchFile, name, play)

    buffer = disk_module.Disk.buffer
    with (
        mock.patch.object(disk_module, "ThreadPool", Pool),
        mock.patch.object(disk_module.Disk, "buffer", lambda self, nbytes: order.know(buffer(self, nbytes))),
        watched("read"),
        watched("write"),
        watched("read_some"),
        watched("write_some"),
    ):
        yield


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [found for each in tree for found in _tensors(each)] if isinstance(tree, list | tuple) else []


def _share(out: Any, args: Any) -> bool:
    """Whether results that may be views (as of `to`, which is not decomposed inside an operation) really are."""
    of_args = {tensor.untyped_storage()._cdata for tensor in _tensors(args)}
    return all(tensor.untyped_storage()._cdata in of_args for tensor in _tensors(out))


def _range(tensor: Tensor) -> tuple[int, int, int]:
    """Return a tensor's storage, and the first byte and the end of its span there."""
    storage = tensor.untyped_storage()._cdata
    if tensor.numel() == 0:
        return storage, 0, 0
    first = tensor.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return storage, first * tensor.itemsize, (last + 1) * tensor.itemsize


@contextmanager
def played(slow_disk: bool = True, **options: Any) -> Iterator[Order]:
    """Make `sw.shard` on CPU ranks use StreamCollectives with `options` on simulated streams inside the block. Yields
    the Order. Every rank must call this.

    slow_disk: a disk's work only counts as done once somebody has waited for it.
    """
    skip_beside_one("a simulation of streams")
    order = Event.order = Order()

    class Played(ChannelStreams):
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
        mock.patch.object(on_streams, "all_gather_single", order.all_gather),
        mock.patch.object(on_streams, "reduce_scatter_single", order.reduce_scatter),
        mock.patch.object(on_streams.dist, "all_reduce", order.all_reduce),
        mock.patch.object(on_streams.dist, "all_to_all_single", order.all_to_all),
        mock.patch.object(accelerators, "new_stream", Stream),
        mock.patch.object(accelerators, "on", order.stream),
        mock.patch.object(accelerators, "current_stream", order.current_stream),
        mock.patch.object(device_tools, "has_memory", return_value=True),
        mock.patch.object(device_tools, "wait", order.wait),
        mock.patch.object(host_threads, "on_host", order.on_host),
        mock.patch.object(device_tools, "sent", order.sent),
        _threads(order, slow_disk),
        order,
    ):
        yield order

"""A process group for CPU ranks that behaves like NCCL's. It really moves the bytes, over gloo.

    with doubled() as launches:            # models are sharded over StreamCollectives on such groups
        Twins().train()

- It rejects the dtypes that NCCL does not support, with NCCL's error, and sums in the dtype of its inputs.
- It has only the collectives that the engine calls: no send, and no gather of objects of different sizes.
- Collectives inside torch's coalescing manager are one launch. Every launch is recorded.
- It does not notice when a peer is gone. A rank that needs that peer hangs in native code, where Python's signal
  handlers do not run, until the watchdog aborts the process.
- Leaving the group (`destroy_process_group`, the interpreter's exit) is collective too: it waits for every peer, or for
  the watchdog.

`backward_elsewhere` makes autograd run nodes and hooks in another thread than the caller's, as it does for devices.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from shardwise import accelerators
from shardwise.comm.backends.tree_channel import channel_of
from shardwise.comm.torch_channels import ChannelStreams
from shardwise.fsdp import mesh as mesh_module
from tests.engine.streams import Stream

BACKEND = "nccl_double"
WATCHDOG = "NCCL_DOUBLE_WATCHDOG_S"
"""Name of the environment variable with the watchdog's timeout in seconds; default: the group's timeout."""
KNOWN = {
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz),
}
"""The dtypes for which c10d has a ncclDataType_t."""


@dataclass(frozen=True)
class Launch:
    """A launch of one collective, or of several that were coalesced."""

    op: str
    dtypes: tuple[torch.dtype, ...]
    """The dtype of each collective."""


class NcclDouble(dist.ProcessGroup):
    """One rank's handle on a group."""

    launches: ClassVar[list[Launch]] = []
    """Launches of all groups of this process."""
    alive: ClassVar[weakref.WeakSet[NcclDouble]] = weakref.WeakSet()

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._watchdog = timedelta(seconds=float(os.environ.get(WATCHDOG, timeout.total_seconds())))
        again = (store.add("made", 1) - 1) // size  # a group of this name may have existed before
        self._store = dist.PrefixStore(f"{again}/", store)
        self._gloo = dist.ProcessGroupGloo(self._store, rank, size, self._watchdog)
        self._has_left = False
        NcclDouble.alive.add(self)

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    # Collectives, called by torch.distributed -------------------------------------------------------------------------

    def all_gather_single(self, whole: Tensor, own: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([whole], [own], opts)

    def all_gather_single_coalesced(self, wholes: Sequence[Tensor], owns: Sequence[Tensor], opts: Any = None) -> Any:
        self._launch("all_gather", [*wholes, *owns], len(owns))
        for whole, own in zip(wholes, owns, strict=True):
            _same_numel(whole.numel(), own.numel() * self.size())
            torch.stack(self._of_every_rank(own), out=whole.view(self.size(), -1))
        return _work(opts)

    def reduce_scatter_single(self, own: Tensor, whole: Tensor, opts: Any) -> Any:
        return self.reduce_scatter_single_coalesced([own], [whole], opts)

    def reduce_scatter_single_coalesced(self, owns: Sequence[Tensor], wholes: Sequence[Tensor], opts: Any) -> Any:
        self._launch("reduce_scatter", [*wholes, *owns], len(owns))
        for whole, own in zip(wholes, owns, strict=True):
            _same_numel(whole.numel(), own.numel() * self.size())
            own.view(-1).copy_(self._reduced(whole, opts).chunk(self.size())[self.rank()])
        return _work(opts)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        self._launch("all_reduce", tensors, len(tensors))
        for tensor in tensors:
            tensor.view(-1).copy_(self._reduced(tensor, opts))
        return _work(opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        self._launch("broadcast", tensors, len(tensors))
        for tensor in tensors:
            tensor.view(-1).copy_(self._of_every_rank(tensor)[opts.rootRank])
        return _work(opts)

    def allgather(self, rows: Sequence[Sequence[Tensor]], owns: Sequence[Tensor], opts: Any = None) -> Any:
        self._launch("all_gather", [*rows[0], *owns], len(owns))
        for row, theirs in zip(rows[0], self._of_every_rank(owns[0]), strict=True):
            row.view(-1).copy_(theirs)
        return _work(opts)

    def barrier(self, opts: Any = None) -> Any:
        self._launch("barrier", [], 1)
        self._of_every_rank(torch.zeros(1))
        return _work(opts)

    # torch 2.11's names
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _launch(self, op: str, tensors: Sequence[Tensor], count: int) -> None:
        for tensor in tensors:
            if tensor.dtype not in KNOWN:
                raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
            if op in {"reduce_scatter", "all_reduce"} and tensor.dtype.is_floating_point and tensor.itemsize == 1:
                raise TypeError("Unsupported Float8 type for NCCL reduction")
        NcclDouble.launches.append(Launch(op, tuple(tensor.dtype for tensor in tensors[:count])))

    def _of_every_rank(self, own: Tensor) -> list[Tensor]:
        """Return every rank's tensor, flattened, in rank order."""
        sent = own.detach().reshape(-1).clone()
        rows = [torch.empty_like(sent) for _ in range(self.size())]
        with self._deaf():
            self._gloo.allgather([[row.view(torch.uint8) for row in rows]], [sent.view(torch.uint8)]).wait()
        return rows

    def _reduced(self, own: Tensor, opts: Any) -> Tensor:
        total, *others = self._of_every_rank(own)
        largest = opts.reduceOp == dist.ReduceOp.MAX or own.dtype == torch.bool
        for other in others:
            total = torch.maximum(total, other) if largest else total + other
        return total / self.size() if opts.reduceOp == dist.ReduceOp.AVG else total

    # The end ----------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._has_left:
            return
        self._has_left = True
        with self._deaf():
            if self._store.add("leaving", 1) == self.size():
                self._store.set("all are leaving", "1")
            self._store.wait(["all are leaving"], self._watchdog)

    def abort(self) -> None:
        self._has_left = True

    @contextmanager
    def _deaf(self) -> Iterator[None]:
        """Wrap code that needs peers. If one is gone or times out, hang until the watchdog aborts, as with NCCL."""
        began_s = time.monotonic()
        try:
            yield
        except RuntimeError:
            _hang(self._watchdog.total_seconds() - (time.monotonic() - began_s))


def _hang(for_s: float) -> NoReturn:
    watchdog = threading.Timer(max(for_s, 0.0), os.abort)
    watchdog.daemon = True
    watchdog.start()
    while True:
        Future[None]().wait()  # type: ignore[no-untyped-call]


@atexit.register
def _leave_at_exit() -> None:
    for group in list(NcclDouble.alive):
        group.shutdown()


def _same_numel(whole: int, parts: int) -> None:
    if whole != parts:
        raise ValueError("output tensor size must be equal to world_size times input tensor size")


def _work(opts: Any) -> Any:
    """Return finished work for an asynchronous call; None for others, whose work is all on the current stream."""
    if opts is not None and not opts.asyncOp:
        return None
    done: Any = Future()
    done.set_result(None)
    return torch._C._distributed_c10d._create_work_from_future(done)


dist.Backend.register_backend(BACKEND, NcclDouble, devices=["cpu"])

# Where models meet it -------------------------------------------------------------------------------------------------


@contextmanager
def doubled(**options: Any) -> Iterator[list[Launch]]:
    """Make `sw.shard` on CPU ranks use StreamCollectives (created with `options`) on NcclDouble groups inside the
    block, whatever the backend of the given group. Yields the list of launches. Every rank must call this."""

    def collectives_for(group: dist.ProcessGroup | None, device: torch.device) -> ChannelStreams:
        group = group or dist.group.WORLD
        assert group is not None
        if not isinstance(group, NcclDouble):
            ranks = dist.get_process_group_ranks(group)
            group = dist.new_group(ranks, backend=BACKEND, use_local_synchronization=True)
        return ChannelStreams(group, device, channel=channel_of, **options)

    NcclDouble.launches.clear()
    with mock.patch.object(mesh_module, "collectives_for", collectives_for), streams():
        yield NcclDouble.launches


@contextmanager
def streams() -> Iterator[None]:
    """Fake a CUDA device's streams inside the block. Work runs at once; `test_stream_order` checks its order."""
    current = [Stream()]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    def of(device: object = None) -> Stream:
        return current[-1]

    with (
        mock.patch.object(accelerators, "new_stream", Stream),
        mock.patch.object(accelerators, "on", on),
        mock.patch.object(accelerators, "current_stream", of),
    ):
        yield


@contextmanager
def backward_elsewhere() -> Iterator[list[str]]:
    """Make autograd run nodes, hooks and its final callback in one separate thread inside the block; the caller waits.

    Yields a list that receives the name of the thread of each backward.
    """
    run: Callable[..., Any] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    threads: list[str] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return run(*args, **kwargs)

    with ThreadPoolExecutor(1, "device") as device:

        def hand_over(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name.startswith("device"):  # a backward inside a backward
                return noted(*args, **kwargs)
            return device.submit(noted, *args, **kwargs).result()

        with mock.patch.object(torch.autograd, "_engine_run_backward", hand_over):
            yield threads

"""A process group of two ranks on one device that orders work as NCCL does: by streams and events, never by the host.

What a rank sends lies in memory that both processes have mapped. "It is there" and "I have read it" are events that
both know, so the host only makes sure that an event was recorded before the peer waits for it, and goes on. Where the
device's memory cannot be shared between processes, `Staged` takes bytes through the host instead, which waits.

On a CPU the memory is a mapped file and events do nothing: the host's meetings are order enough.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.multiprocessing.reductions import reduce_tensor

from benchmarks.accelerator.device import HostEvent, current_stream

LANE_BYTES = 16 * 2**20
LANES = ("gather", "reduce", "other")
"""Collectives of one lane wait for one another and for no other lane's."""

Delay = Callable[[str], None]
"""Called with the lane before a collective of it is enqueued, on its stream."""


@dataclass(frozen=True)
class Lane:
    """One rank's end: memory that it writes and its peer reads, and what it has to say about it."""

    memory: Tensor
    ready: Any
    """After what lies in the memory was written."""
    done: Any
    """After this rank has read its peer's."""


class Shared:
    """Both ends of every lane, in memory of the device."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, folder: Path) -> None:
        """Every rank must call this. Raises RuntimeError on every rank if any could not share its memory.

        Args:
            group: two ranks that can meet on the host.
        """
        self._group, self.device = group, device
        self._mine: dict[str, Lane] = {}
        self._theirs: dict[str, Lane] = {}
        handles: Any = None
        with contextlib.suppress(RuntimeError):
            handles = {name: self._make(name, folder / f"{name}-{group.rank()}") for name in LANES}
        told = self._tell(handles)
        problem = "" if None not in told else "memory cannot be exported"
        if not problem:
            try:
                self._theirs = {name: self._open(*handle) for name, handle in told[1 - group.rank()].items()}
            except RuntimeError as error:
                problem = str(error)
        problems = [said for said in self._tell(problem) if said]
        if problems:
            raise RuntimeError(problems[0])

    def swap(self, name: str, mine: Tensor) -> Tensor:
        """Enqueue the sending of `mine` (1-D); returns the peer's, to be read on the current stream until `close`."""
        own, other, stream = self._mine[name], self._theirs[name], current_stream(self.device)
        assert mine.nbytes <= LANE_BYTES, f"{mine.nbytes} bytes are too many for a lane"
        stream.wait_event(other.done)  # the peer has read what was sent last
        own.memory[: mine.nbytes].view(mine.dtype).copy_(mine)
        own.ready.record(stream)
        self.meet()
        stream.wait_event(other.ready)
        return other.memory[: mine.nbytes].view(mine.dtype)

    def close(self, name: str) -> None:
        """What `swap` gave has been read by everything that is enqueued now."""
        self._mine[name].done.record(current_stream(self.device))
        self.meet()

    def meet(self) -> None:
        """Both hosts are here. Nobody waits for a device."""
        dist.barrier(self._group)

    def _tell(self, what: Any) -> list[Any]:
        told: list[Any] = [None, None]
        dist.all_gather_object(told, what, group=self._group)
        return told

    def _make(self, name: str, path: Path) -> tuple[Any, ...]:
        if self.device.type == "cpu":
            memory = torch.from_file(str(path), shared=True, size=LANE_BYTES, dtype=torch.uint8)
            self._mine[name] = Lane(memory, HostEvent(), HostEvent())
            return (str(path),)
        memory = torch.zeros(LANE_BYTES, dtype=torch.uint8, device=self.device)
        ready, done = (torch.cuda.Event(interprocess=True) for _ in range(2))
        for event in (ready, done):
            event.record()  # so that it exists; the peer may wait for it before it has anything to say
        torch.cuda.synchronize(self.device)
        self._mine[name] = Lane(memory, ready, done)
        return (*reduce_tensor(memory), ready.ipc_handle(), done.ipc_handle())

    def _open(self, *handle: Any) -> Lane:
        if self.device.type == "cpu":
            memory = torch.from_file(handle[0], shared=True, size=LANE_BYTES, dtype=torch.uint8)
            return Lane(memory, HostEvent(), HostEvent())
        rebuild, arguments, ready, done = handle
        events = (torch.cuda.Event.from_ipc_handle(self.device, told) for told in (ready, done))
        return Lane(rebuild(*arguments), *events)


class Staged:
    """Through the host, which waits for the device: what comes out is right, and less is seen of the order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def swap(self, name: str, mine: Tensor) -> Tensor:
        sent = mine.cpu().contiguous().view(torch.uint8)
        both = [torch.empty_like(sent) for _ in range(2)]
        dist.all_gather(both, sent, group=self._group)
        return both[1 - self._group.rank()].view(mine.dtype).to(mine.device)

    def close(self, name: str) -> None: ...

    def meet(self) -> None:
        dist.barrier(self._group)


class Exchange(dist.ProcessGroup):
    """What c10d calls. Sums of two terms have the same bits in either order."""

    def __init__(self, rank: int, size: int, way: Shared | Staged) -> None:
        super().__init__(rank, size)
        assert size == 2, f"two ranks, not {size}"
        self._own_rank = rank
        self._way = way
        self.delay: Delay = lambda lane: None

    @contextlib.contextmanager
    def _swapped(self, lane: str, mine: Tensor) -> Iterator[Tensor]:
        self.delay(lane)
        try:
            yield self._way.swap(lane, mine.detach().reshape(-1))
        finally:
            self._way.close(lane)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Any:
        parts = output.chunk(2)
        with self._swapped("gather", own) as theirs, torch.no_grad():
            if parts[self._own_rank].data_ptr() != own.data_ptr():
                parts[self._own_rank].copy_(own)
            parts[1 - self._own_rank].copy_(theirs)
        return _over()

    def reduce_scatter_single(self, output: Tensor, flat: Tensor, opts: Any = None) -> Any:
        with self._swapped("reduce", flat) as theirs, torch.no_grad():
            own, other = flat.chunk(2)[self._own_rank], theirs.chunk(2)[self._own_rank]
            torch.add(own, other, out=output)
        return _over()

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            with self._swapped("reduce", tensor) as theirs, torch.no_grad():
                combine = torch.maximum if opts is not None and opts.reduceOp == dist.ReduceOp.MAX else torch.add
                flat = tensor.view(-1)
                combine(flat, theirs, out=flat)
        return _over()

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            with self._swapped("other", tensor) as theirs, torch.no_grad():
                if opts is not None and opts.rootRank != self._own_rank:
                    tensor.view(-1).copy_(theirs)
        return _over()

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], owns: Sequence[Tensor], opts: Any = None) -> Any:
        for output, own in zip(outputs, owns, strict=True):
            self.all_gather_single(output, own)
        return _over()

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], flats: Sequence[Tensor], opts: Any = None
    ) -> Any:
        for output, flat in zip(outputs, flats, strict=True):
            self.reduce_scatter_single(output, flat)
        return _over()

    def barrier(self, opts: Any = None) -> Any:
        self._way.meet()
        return _over()

    # As torch called them before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _over() -> Any:
    """The work of something that was enqueued."""
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    return _create_work_from_future(future)


def exchange_group(way: Shared | Staged) -> Exchange:
    """A group of both ranks over `way`. Every rank must call this."""
    made: list[Exchange] = []

    def create(store: Any, rank: int, size: int, timeout: Any) -> Exchange:
        made.append(Exchange(rank, size, way))
        return made[0]

    name = "exchange"
    dist.Backend.register_backend(name, create, devices=["cpu", "cuda"])
    dist.new_group(backend=name)
    return made[0]

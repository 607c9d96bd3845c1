"""The collectives of torch.distributed: on CPUs, on accelerators, for a rank alone, and which of them a group gets."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import accelerators
from shardwise.fsdp.collectives import (
    FINISHED,
    Buffer,
    BufferKind,
    ChainedWork,
    Collectives,
    Combine,
    FlatSpan,
    PrivateBuffers,
    Reduction,
    Work,
    check_reductions,
    deliver,
    finishing_op,
    slice_of,
)
from shardwise.registry import first_answer

# On CPUs --------------------------------------------------------------------------------------------------------------

# Each collective is called as it is and begun asynchronously. gloo sums in the dtype of the tensors and knows few of
# them, so terms are widened before they are sent: floats to fp32 at least, small integers to int64. It decides in which
# order terms are added.

# torch 2.13 renamed these functions.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_SUMMED = (torch.float32, torch.float64, torch.int32, torch.int64)


class TorchCollectives(PrivateBuffers):
    """Collectives of ranks whose process group supports CPU tensors."""

    name = "torch"

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device | str = "cpu",
        poison: bool | None = None,
    ) -> None:
        """
        Args:
            group: the ranks' process group; it must have a backend for the device.
            device: this rank's device.
            poison: fill released buffers with 0xFF bytes; None: as the environment says.
        """
        super().__init__(group.rank(), group.size(), device, poison)
        self.process_group = group
        self._group = group

    def all_gather(self, buffer: Buffer, spans: tuple[FlatSpan, ...], label: int = 0) -> Work:
        """Gather each span in place."""
        wholes = [buffer.bytes[span.start :][: span.shard_bytes * self.world_size] for span in spans]
        return Begun(
            [
                all_gather_single(whole, slice_of(whole, self.rank, self.world_size), group=self._group, async_op=True)
                for whole in wholes
            ]
        )

    @torch.no_grad()
    def reduce_scatter(self, buffer: Buffer, reductions: tuple[Reduction, ...], label: int = 0) -> Work:
        """Reduce each flat buffer to a sum in memory of its own, which `Work.wait` delivers."""
        check_reductions(reductions, self.world_size, may_scale=False)
        terms = [_widened(real(r.flat).view(-1)) for r in reductions]
        sums = [torch.empty_like(slice_of(term, self.rank, self.world_size)) for term in terms]
        works = [
            reduce_scatter_single(summed, term, group=self._group, async_op=True)
            for summed, term in zip(sums, terms, strict=True)
        ]
        return Begun(works, partial(self._deliver, reductions, sums))

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor, op: str = "sum", after: Work = FINISHED, label: int = 0) -> Work:
        """Reduce in place, or in a wider dtype and then back."""
        if after is not FINISHED:
            return ChainedWork(after, lambda: self.all_reduce(tensor, op, label=label))
        flat = real(tensor.detach()).view(-1)
        moving = _widened(flat)
        work = dist.all_reduce(moving, OPS[op], group=self._group, async_op=True)
        return Begun([work], None if moving is flat else partial(flat.copy_, moving))

    @torch.no_grad()
    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Broadcast the tensor's bytes; on a device, on the current stream."""
        dist.broadcast(tensor.detach().view(-1).view(torch.uint8), group=self._group, group_src=src)

    def barrier(self) -> None:
        """Wait on the host until every rank has called this."""
        dist.barrier(self._group)

    def exchange(self, message: bytes, combine: Combine, label: int = 0) -> bytes:
        """Exchange through the group. On a device it waits for the collectives before it. A rank that raises tells
        nobody: its peers wait for the group's timeout."""
        messages = [b""] * self.world_size
        dist.all_gather_object(messages, message, group=self._group)
        return functools.reduce(combine, messages)

    def _deliver(self, reductions: Sequence[Reduction], sums: Sequence[Tensor]) -> None:
        for r, summed in zip(reductions, sums, strict=True):
            deliver(torch.view_as_complex(summed.view(-1, 2)) if r.flat.is_complex() else summed, r, self._factors)


class Begun:
    """Work of torch.distributed that has begun, and what remains to be done on this rank when it is complete."""

    def __init__(self, works: Sequence[dist.Work], finish: Callable[[], object] | None = None) -> None:
        self._works = works
        self._finish = finish

    @torch.no_grad()
    def wait(self) -> None:
        """See `Work.wait`."""
        for work in self._works:
            work.wait()
        finish, self._works, self._finish = self._finish, (), None
        if finish is not None:
            finish()


def real(flat: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones, in the same memory; other tensors as they are."""
    return torch.view_as_real(flat) if flat.is_complex() else flat


def _widened(flat: Tensor) -> Tensor:
    """Return numbers in a dtype in which gloo may sum them: the tensor itself if possible."""
    if flat.dtype in _SUMMED:
        return flat
    return flat.float() if flat.is_floating_point() else flat.long()


# On accelerators ------------------------------------------------------------------------------------------------------

# Collectives are in place as NCCL defines it: a rank's slice is at buffer + rank * count.
#
# For every torch.distributed backend that works on streams: nccl (CUDA), rccl (ROCm; torch also calls it nccl), xccl
# and hccl.
#
# This rank's slices are written on one stream, gathers run on another and reductions on a third, so a slice is written
# while the previous gather is still under way. Memory is ordered by events, never by `record_stream`, so that the
# allocator sees a block as free at the moment when the engine frees it. `current_stream()` is read in each call.
#
# Not run on a GPU by its author yet. That streams and events leave no access unordered is tested without one
# (`tests/engine/devices/test_stream_order.py`); dtypes, coalescing and training are tested with a double of NCCL's
# process group (`tests/comm/nccl_double.py`).
#
# Unlike on CPUs, the backend decides the order of a sum, and adds terms narrower than fp32 in their own dtype.

_REFUSED = (torch.int16, torch.uint16, torch.uint32)
"""Dtypes that NCCL does not have; all_reduce sums them as int64. Complex numbers, which it lacks too, are summed as
pairs. Data that is only moved is sent as bytes."""

_AVERAGING = ("nccl", "fake")
"""Substrings of the names of backends that support a mean (AVG). gloo supports only sums; others are not known to."""


class StreamCollectives(TorchCollectives):
    """Collectives of ranks on accelerators, one accelerator for each rank."""

    name = "streams"

    def __init__(self, group: dist.ProcessGroup, device: torch.device, poison: bool | None = None) -> None:
        """As that of `TorchCollectives`."""
        super().__init__(group, device, poison)
        self.on_streams = True
        self._reduce_group = group
        """The group whose communicator reductions use."""
        self._averages = any(name in dist.get_backend(group) for name in _AVERAGING)
        self._slice_stream = accelerators.new_stream(device)
        self._gather_stream = accelerators.new_stream(device)
        self._reduce_stream = accelerators.new_stream(device)
        self._free: dict[int, torch.Event] = {}
        """By buffer index: an event after the buffer's last reader, which may be on any stream."""
        self._written: dict[int, torch.Event] = {}
        """By index of a gather buffer: an event after its slices were written on the slice stream."""
        self._read: torch.Event | None = None
        """An event after the last read on the slice stream; None if the current stream is already ordered after it."""

    def allocate(self, nbytes: int, kind: BufferKind) -> Buffer:
        """Allocate memory from the caching allocator."""
        buffer = super().allocate(nbytes, kind)
        self._free[buffer.index] = self._current().record_event()  # the block's last user is on the current stream
        return buffer

    def claim(self, buffer: Buffer) -> None:
        """Order the current stream after the last use of a reduce buffer. For gather buffers `writing` does this."""
        if buffer.kind is BufferKind.REDUCE:
            self._after_last_reader(buffer, self._current())

    def mark(self) -> Work:
        """Record an event on the current stream."""
        return _OnStream(self._current(), keep=None)

    @contextlib.contextmanager
    def writing(self, buffer: Buffer, after: Work = FINISHED) -> Iterator[None]:
        """Run the block on the slice stream."""
        stream = self._slice_stream
        self._after_last_reader(buffer, stream)
        if isinstance(after, _OnStream):
            stream.wait_event(after.event)
        try:
            with accelerators.on(stream):
                yield
            self._written[buffer.index] = stream.record_event()
        finally:
            self._read = stream.record_event()

    def settle(self) -> None:
        """Order the current stream after the last `writing` block."""
        if self._read is not None:
            self._current().wait_event(self._read)
            self._read = None

    def all_gather(self, buffer: Buffer, spans: tuple[FlatSpan, ...], label: int = 0) -> Work:
        """Gather in place, on the gather stream. Several spans take one launch."""
        stream = self._gather_stream
        self._after_slices(buffer, stream)
        with accelerators.on(stream), self._together(self._group, len(spans)):
            for span in spans:
                nbytes = span.shard_bytes * self.world_size
                whole = buffer.bytes[span.start : span.start + nbytes]
                all_gather_single(whole, slice_of(whole, self.rank, self.world_size), group=self._group)
        return _OnStream(stream, keep=buffer)

    def release(self, buffer: Buffer) -> None:
        """Record an event after which the buffer may be written."""
        super().release(buffer)
        self._free[buffer.index] = self._current().record_event()

    def replace(self, buffer: Buffer) -> Buffer:
        """Return new memory of the caching allocator. The old memory is freed with its last view."""
        # The new memory may be a block freed on the current stream, so the next writer waits for that stream. The old
        # memory may be freed at any time: the caller has waited, so the current stream is ordered after its gather.
        replacement = super().replace(buffer)
        self._free[buffer.index] = self._current().record_event()
        return replacement

    def drop(self, buffer: Buffer) -> None:
        """Order the current stream, to which the buffer's block belongs, after the buffer's last use."""
        self._after_last_reader(buffer, self._current())
        self._free.pop(buffer.index, None)
        self._written.pop(buffer.index, None)

    @torch.no_grad()
    def reduce_scatter(self, buffer: Buffer, reductions: tuple[Reduction, ...], label: int = 0) -> Work:
        """Reduce on the reduce stream. Several reductions take one launch. Sums that need no cast, scaling or addition
        are written to `out` directly, others first to this rank's slice of `flat`."""
        check_reductions(reductions, self.world_size)
        finishing = finishing_op(reductions, self.world_size)
        if finishing == "mean" and not self._averages:
            finishing = None
        op = dist.ReduceOp.AVG if finishing == "mean" else dist.ReduceOp.SUM
        with self._on(self._reduce_stream):
            into = [r.out if finishing else slice_of(r.flat, self.rank, self.world_size) for r in reductions]
            with self._together(self._reduce_group, len(reductions)):
                for r, part in zip(reductions, into, strict=True):
                    reduce_scatter_single(real(part), real(r.flat), op=op, group=self._reduce_group)
            for r, part in zip(reductions, into, strict=True):
                if part is not r.out:
                    deliver(part, r, self._factors)
        work = _OnStream(self._reduce_stream, keep=reductions)
        self._free[buffer.index] = work.event
        return work

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor, op: str = "sum", after: Work = FINISHED, label: int = 0) -> Work:
        """Reduce in place, on the reduce stream."""
        with self._on(self._reduce_stream):
            if isinstance(after, _OnStream):  # another group's, so on another stream; `after` keeps its memory until
                self._reduce_stream.wait_event(after.event)  # the compute stream has waited for it as well
            moving = tensor.detach().long() if tensor.dtype in _REFUSED else real(tensor.detach())
            dist.all_reduce(moving, OPS[op], group=self._reduce_group)
            if tensor.dtype in _REFUSED:
                tensor.detach().copy_(moving)
        return _OnStream(self._reduce_stream, keep=(tensor, after))

    @torch.no_grad()
    def reducing(self, buffer: Buffer, keep: object, launch: Callable[[dist.ProcessGroup], object]) -> Work:
        """Call `launch` with the group for reductions, on their stream; what it launches uses the buffer. `keep`: holds
        memory that it uses as well."""
        with self._on(self._reduce_stream):
            launch(self._reduce_group)
        work = _OnStream(self._reduce_stream, keep=keep)
        self._free[buffer.index] = work.event
        return work

    def barrier(self) -> None:
        """Wait on the host until every rank has called this."""
        dist.barrier(self._group, device_ids=[self.device.index or 0])

    def _current(self) -> torch.Stream:
        return accelerators.current_stream(self.device)

    def _after_last_reader(self, buffer: Buffer, stream: torch.Stream) -> None:
        if buffer.index in self._free:
            stream.wait_event(self._free.pop(buffer.index))

    def _after_slices(self, buffer: Buffer, stream: torch.Stream) -> None:
        """Order `stream` after the writes of this rank's slices into a gather buffer."""
        written = self._written.pop(buffer.index, None)
        if written is None:  # then they were written on the current stream
            self._after_last_reader(buffer, stream)
            written = self._current().record_event()
        stream.wait_event(written)

    @contextlib.contextmanager
    def _on(self, stream: torch.Stream) -> Iterator[None]:
        """A context that enqueues on `stream`, ordered after everything on the current stream so far."""
        stream.wait_stream(self._current())
        with accelerators.on(stream):
            yield

    @staticmethod
    @contextlib.contextmanager
    def _together(group: dist.ProcessGroup, count: int) -> Iterator[None]:
        """A context that launches its `count` collectives as one. If it raises (also on an interrupt), none is launched
        and the group's state is reset: otherwise torch would record all later collectives and launch none."""
        c10d = dist.distributed_c10d
        try:
            with c10d._coalescing_manager(group) if count > 1 else contextlib.nullcontext():
                yield
        except BaseException:
            c10d._world.pg_coalesce_state.pop(group, None)
            raise


class _OnStream:
    """The work enqueued on a stream so far."""

    def __init__(self, stream: torch.Stream, keep: object) -> None:
        """`keep`: holds memory that the stream uses, until `wait` orders the current stream after the work."""
        self.event = stream.record_event()
        self._stream = stream
        self._keep: object | None = keep

    def wait(self) -> None:
        accelerators.current_stream(self._stream.device).wait_event(self.event)
        self._keep = None


# For a rank alone -----------------------------------------------------------------------------------------------------


class DryCollectives(PrivateBuffers):
    """The collectives of one rank in a world of any size, without its peers.

    For a world of one they are complete. For a larger one shapes, dtypes and local operations are real, but the peers'
    contributions are missing, which is enough to plan with fake tensors.
    """

    name = "dry"

    def all_gather(self, buffer: Buffer, spans: tuple[FlatSpan, ...], label: int = 0) -> Work:
        """Leave the peers' slices as they are."""
        return FINISHED

    @torch.no_grad()
    def reduce_scatter(self, buffer: Buffer, reductions: tuple[Reduction, ...], label: int = 0) -> Work:
        """Deliver this rank's own term as the sum."""
        check_reductions(reductions, self.world_size)
        for r in reductions:
            deliver(slice_of(r.flat, self.rank, self.world_size), r, self._factors)
        return FINISHED

    def all_reduce(self, tensor: Tensor, op: str = "sum", after: Work = FINISHED, label: int = 0) -> Work:
        """Leave the tensor as it is."""
        return after

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Leave the tensor as it is."""

    def barrier(self) -> None:
        """Return at once."""

    def exchange(self, message: bytes, combine: Combine, label: int = 0) -> bytes:
        """Return this rank's message."""
        return message


# The choice -----------------------------------------------------------------------------------------------------------

SEAM = "collectives"
"""Functions that are asked first: (group, device) -> Collectives | None. Every rank of the group calls them."""


def collectives_for(group: dist.ProcessGroup | None, device: torch.device | str) -> Collectives:
    """Return the collectives for a group's ranks. Every rank of the group must call this.

    Args:
        group: None means the default group, or a world of one if torch.distributed is not initialised.
        device: the device of this rank's buffers.

    Returns:
        What the first registered function returns that returns any; else dry ones for a world of one and under torch's
        `fake` process group, and torch's own for others: on streams for an accelerator.
    """
    device = torch.device(device)
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    attached: Collectives | None = first_answer(SEAM, group, device)
    if attached is not None:
        return attached
    if group is None:
        return DryCollectives(0, 1, device)
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return DryCollectives(group.rank(), group.size(), device)
    return TorchCollectives(group) if device.type == "cpu" else StreamCollectives(group, device)

"""The collectives that the engine uses: one small protocol, many implementations, and what they share.

Life of a *gather buffer* (one arena slot), the same on every rank and in the same order:

    claim -> write the own slice of each span -> all_gather -> Work.wait -> read -> release -> claim ...

Life of a *reduce buffer*:

    claim -> write full gradients -> reduce_scatter -> Work.wait (the outputs are ready) -> claim ...

`claim` and `release` are where an implementation orders memory accesses: on streams they wait for and record device
events, in shared memory they wait for and advance counters that peers watch; with buffers of one process they do
nothing. A gather buffer is read only between `wait` and `release`, and written only between `claim` and `all_gather`.

Every method is collective unless its docstring denies it: all ranks of the group call it in the same order. Each call
carries its purpose as a *label*, a small number that is the same on every rank; `labels` has the words. Ranks that come
to an `exchange` with different labels raise a MismatchError that names both; in gloo and shm, to any collective.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class BufferKind(enum.Enum):
    """Purpose of a buffer."""

    GATHER = "gather"
    """Parameters: every rank writes its slice, every rank reads all of it."""
    REDUCE = "reduce"
    """Gradients: every rank writes all of its own buffer and reads its own slice of every rank's buffer."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Buffer:
    """Memory that collectives work in, in place. Allocated once, by `Collectives.allocate`; kept by its holders."""

    bytes: Tensor
    """1-D uint8, local. Its storage starts on a 64-byte boundary and belongs to this buffer alone."""
    kind: BufferKind
    index: int
    """Position among all buffers of this `Collectives`; the same on every rank."""


@dataclass(frozen=True, slots=True)
class FlatSpan:
    """One flat layout in a gather buffer: rank r's slice is `shard_bytes` bytes from start + r * shard_bytes on."""

    start: int
    shard_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """The reduction of one flat buffer: out (+)= sum over ranks of their flat[rank * S : (rank + 1) * S]."""

    flat: Tensor
    """1-D view of a reduce buffer, world_size * S elements, local, in the dtype that is sent."""
    out: Tensor
    """1-D, S elements: this rank's slice of the sum, perhaps of another dtype; may be this rank's slice of `flat`."""
    accumulate: bool
    """Whether to add to `out` instead of overwriting it."""
    scale: float = 1.0
    """Factor for the sum before it is written to `out`. Must be 1 unless the collectives are `on_streams`."""


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when the result is in place (a GPU: order the current stream after it). Not collective; idempotent."""


class Finished:
    """A `Work` that is complete when it is returned."""

    def wait(self) -> None:
        """Return at once."""


FINISHED = Finished()


class ChainedWork:
    """A `Work` in two phases. The second begins when the first is complete, and only inside `wait`."""

    def __init__(self, first: Work, second: Callable[[], Work]) -> None:
        self._first = first
        self._second: Callable[[], Work] | None = second

    def wait(self) -> None:
        """Wait for the first phase, then begin the second and wait for it."""
        self._first.wait()
        if self._second is not None:
            second, self._second = self._second, None
            second().wait()


Combine = Callable[[bytes, bytes], bytes]
"""Combines two messages into one. Must be associative and commutative: the order need not be that of ranks."""


class Collectives(Protocol):
    """The collectives of one group of ranks. On CPUs sums are computed in fp32 or wider, by gloo and shm in rank order;
    on accelerators the backend decides order and dtype."""

    name: str
    """"torch", "streams", "dry", or that of a backend: "gloo", "shm"."""
    rank: int
    """This rank's position in the group."""
    world_size: int
    device: torch.device
    on_streams: bool
    """Whether work is enqueued for a device, so that each operation costs a launch, whatever its size."""
    process_group: dist.ProcessGroup | None
    """Torch's process group of these ranks; None if there is none."""
    labels: dict[int, str]
    """The labels in words, for error messages. Filled in by the code that chooses the labels."""

    def allocate(self, nbytes: int, kind: BufferKind) -> Buffer:
        """Return a new buffer of `nbytes`, in memory rounded up to a multiple of 64. Its contents are unspecified."""

    def claim(self, buffer: Buffer) -> None:
        """Wait until this rank may write into `buffer`."""

    def mark(self) -> Work:
        """Return the work enqueued on the current stream so far. Does not communicate."""

    def writing(self, buffer: Buffer, after: Work = FINISHED) -> AbstractContextManager[None]:
        """Return a context in which this rank writes its slices into a claimed gather buffer. Does not communicate.

        On streams the writes run on a separate stream. It waits for the buffer's last reader and for `after`, the last
        write to the source of the slices, but not for other computation or gathers.
        """

    def settle(self) -> None:
        """Order the current stream after all reads made inside `writing`, so that what they read may be written again.
        Does not communicate."""

    def all_gather(self, buffer: Buffer, spans: tuple[FlatSpan, ...], label: int = 0) -> Work:
        """Gather every span of a gather buffer, in place, from the slices that the ranks wrote."""

    def release(self, buffer: Buffer) -> None:
        """Declare that this rank has read a gather buffer, or enqueued its last read. If `poison` is set, the buffer is
        filled with 0xFF bytes (NaN in every float dtype) once no rank can be reading it."""

    def replace(self, buffer: Buffer) -> Buffer:
        """Return a replacement for `buffer` with the same index. The old storage stays, with its contents, private to
        this rank, for those who hold views of it. Not collective. Call it between `wait` and `release`; then release
        the replacement."""

    def drop(self, buffer: Buffer) -> None:
        """Give up a buffer with no work under way: its memory is freed with the last view. Not collective, but every
        rank must drop the same buffers between the same calls."""

    def reduce_scatter(self, buffer: Buffer, reductions: tuple[Reduction, ...], label: int = 0) -> Work:
        """Sum each flat buffer over the ranks; each rank keeps its own slice, in `out`."""

    def advance(self) -> None:
        """Continue reductions under way as far as possible without waiting for a peer. Not collective."""

    def all_reduce(self, tensor: Tensor, op: str = "sum", after: Work = FINISHED, label: int = 0) -> Work:
        """Reduce any contiguous tensor in place (it need not be in a buffer), with op "sum" or "max". Large tensors are
        sent as reduce-scatter + all-gather. Sums are bit-identical on all ranks. `after`: work that writes the tensor,
        perhaps in another group, and need not have been waited for; with it, a CPU rank begins only in `Work.wait`."""

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Copy rank `src`'s contiguous tensor to all ranks, in place. Complete on return."""

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def exchange(self, message: bytes, combine: Combine, label: int = 0) -> bytes:
        """Return all ranks' messages combined, the same on every rank. For small messages between hosts: it waits for
        no device. Ranks need not agree on anything before, not even on lengths."""

    def abandon(self, reason: str = "") -> None:
        """Tell peers that this rank raised and takes no part in the next collective: peers that wait for it there, or
        come there later, raise, unless they abandon it as well. Not collective; waits for nobody. `reason`: the error
        in words, which theirs will quote."""

    def close(self) -> None:
        """Close connections, communicators and shared memory. Idempotent; not collective."""


# On one rank ----------------------------------------------------------------------------------------------------------

# What each implementation needs on its own rank: buffers in memory of this process, and checks of arguments.

ALIGNMENT_BYTES = 64
FP32_BYTES = 4
_ANYWHERE = nullcontext()
POISON_BYTE = 0xFF  # repeated, it is NaN in every float dtype


class NoStreams:
    """The stream methods of `Collectives` for CPU ranks, whose operations run in program order."""

    def mark(self) -> Work:
        """Return a finished work."""
        return FINISHED

    def writing(self, buffer: Buffer, after: Work = FINISHED) -> AbstractContextManager[None]:
        """Do nothing: there is nothing to wait for."""
        return _ANYWHERE

    def settle(self) -> None:
        """Do nothing: there is nothing to wait for."""


class PrivateBuffers(NoStreams):
    """Base of collectives whose buffers are in memory of this process alone: most methods for buffers do nothing."""

    def __init__(self, rank: int, world_size: int, device: torch.device | str, poison: bool | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        self.on_streams = self.device.type != "cpu"
        self.poison = poison_asked() if poison is None else poison
        self.process_group: dist.ProcessGroup | None = None
        self.labels: dict[int, str] = {}
        self._allocated = 0
        self._factors = ScaleFactors()

    def allocate(self, nbytes: int, kind: BufferKind) -> Buffer:
        """Allocate memory of this process."""
        self._allocated += 1
        return self._buffer(nbytes, kind, self._allocated - 1)

    def claim(self, buffer: Buffer) -> None:
        """Do nothing: no peer reads the buffer."""

    def release(self, buffer: Buffer) -> None:
        """Fill the buffer with poison, if `poison` is set."""
        if self.poison:
            buffer.bytes.fill_(POISON_BYTE)

    def replace(self, buffer: Buffer) -> Buffer:
        """Return a buffer with the same index in new memory."""
        return self._buffer(buffer.bytes.numel(), buffer.kind, buffer.index)

    def drop(self, buffer: Buffer) -> None:
        """Do nothing: the buffer is not registered anywhere."""

    def advance(self) -> None:
        """Do nothing: no reduction needs it."""

    def abandon(self, reason: str = "") -> None:
        """Do nothing: no peer waits."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _buffer(self, nbytes: int, kind: BufferKind, index: int) -> Buffer:
        reserved = max(ALIGNMENT_BYTES, -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        with torch.inference_mode(False):  # an arena may be built in inference mode, by generate(), and outlives it
            memory = torch.empty(reserved, dtype=torch.uint8, device=self.device)
            if self.poison:
                memory.fill_(POISON_BYTE)
            return Buffer(memory[:nbytes], kind, index)


def poison_asked() -> bool:
    """Whether the environment asks for released memory to be poisoned (`SHARDWISE_POISON=1`)."""
    return os.environ.get("SHARDWISE_POISON", "0") not in ("", "0")


def slice_of(flat: Tensor, rank: int, world_size: int) -> Tensor:
    """Return rank `rank`'s slice of a flat tensor of world_size * S elements."""
    numel = flat.numel() // world_size
    return flat[rank * numel : (rank + 1) * numel]


def same_memory(left: Tensor, right: Tensor) -> bool:
    """Whether two 1-D tensors start at the same byte of one storage. Works without addresses, for fake tensors."""
    storages = left.untyped_storage()._cdata, right.untyped_storage()._cdata
    starts = left.storage_offset() * left.itemsize, right.storage_offset() * right.itemsize
    return storages[0] == storages[1] and starts[0] == starts[1]


def finishing_op(reductions: tuple[Reduction, ...], world_size: int) -> str | None:
    """Return the reduction whose results can be written directly to all outputs: "sum" or "mean" (which not every
    backend has). None if something remains to be done after it: adding, casting, or scaling (narrow dtypes are scaled
    after they are summed)."""
    if any(r.accumulate or r.out.dtype != r.flat.dtype for r in reductions):
        return None
    if all(r.scale == 1.0 for r in reductions):
        return "sum"
    means = all(r.scale == 1.0 / world_size and r.out.itemsize >= FP32_BYTES for r in reductions)
    return "mean" if means else None


class ScaleFactors:
    """Scales as tensors of one element each, made once. Unlike a number, such a tensor widens the other operand inside
    the kernel that multiplies, so that a narrow sum is scaled and cast in one launch and rounded once.

    One instance is used by one stream's operations alone, because nothing orders others after a tensor is filled.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}

    def __call__(self, scale: float, like: Tensor) -> Tensor:
        """Return `scale`, 1-D, in the dtype and on the device of `like`."""
        key = (scale, like.dtype, like.device)
        if key not in self._tensors:
            self._tensors[key] = torch.full((1,), scale, dtype=like.dtype, device=like.device)
        return self._tensors[key]


def deliver(summed: Tensor, reduction: Reduction, factors: ScaleFactors) -> None:
    """Write a sum, computed in this rank's slice of `reduction.flat`, to `reduction.out`, scaled and added as asked."""
    bring(summed, reduction.out, reduction.accumulate, reduction.scale, factors)


def bring(summed: Tensor, out: Tensor, accumulate: bool, scale: float, factors: ScaleFactors) -> None:
    """Compute out[:] = (out if accumulate else 0) + scale * summed, in one operation, in the wider dtype of the two."""
    if accumulate:
        out.add_(summed, alpha=scale)
    elif scale == 1.0:
        if not same_memory(summed, out):
            out.copy_(summed)
    elif out.itemsize <= summed.itemsize:
        torch.mul(summed, scale, out=out)  # the unscaled sum may overflow a narrow `out`
    else:
        torch.mul(summed, factors(scale, out), out=out)


def check_reductions(reductions: tuple[Reduction, ...], world_size: int, may_scale: bool = True) -> None:
    """Assert what the engine must ensure: sizes agree, no output inside its own input is accumulated into, and only
    collectives on streams have to scale."""
    for r in reductions:
        assert may_scale or r.scale == 1.0, "on CPUs terms are scaled before they are summed"
        assert r.flat.shape == (world_size * r.out.numel(),), (
            f"a flat buffer of {r.flat.numel()} elements cannot give {world_size} ranks {r.out.numel()} each"
        )
        in_place = r.flat.untyped_storage()._cdata == r.out.untyped_storage()._cdata
        assert not (in_place and r.accumulate), "an output inside its own input cannot be accumulated into"

"""The collectives that the engine uses: one small protocol, many implementations.

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
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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


class AllToAllPart(NamedTuple):
    """The bytes that one rank sends to another in an `all_to_all`."""

    source: int
    target: int
    nbytes: int


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

    @property
    def scratch_bytes(self) -> int:
        """This rank's memory other than buffers: staging, partial sums. Does not grow any more after the first step."""

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

    def all_to_all(self, buffer: Buffer, parts: tuple[AllToAllPart, ...], into: Tensor, label: int = 0) -> Work:
        """Send at most one part from each rank to each other rank.

        Args:
            buffer: a claimed reduce buffer. It begins with the parts that this rank sends, one after another in the
                order of their targets.
            parts: all parts of all ranks, by source and then by target; the same on every rank.
            into: 1-D uint8. Receives the parts for this rank, one after another in the order of their sources."""

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

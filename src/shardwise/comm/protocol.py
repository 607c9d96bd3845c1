"""The collectives that the engine uses: one small protocol, many implementations.

Life of a *gather buffer* (one arena slot), the same on every rank and in the same order:

    claim -> write the own slice of each span -> all_gather -> Work.wait -> read -> release -> claim ...

Life of a *reduce buffer*:

    claim -> write full gradients -> reduce_scatter -> Work.wait (the outputs are ready) -> claim ...

`claim` and `release` are where an implementation orders memory: streams waits for and records a device's events, shm
waits for and advances counters that its peers watch, gloo and dry have nothing to do. Nobody reads a gather
buffer outside `wait .. release`, and nobody writes one outside `claim .. all_gather`.

Every method is collective unless its docstring denies it: all ranks of the group call it in the same order. The purpose
of each call travels along as a *label*, a small number that is the same on every rank; `labels` has the words. On CPUs
ranks that come with different labels get a MismatchError that names both, on GPUs `exchange` is where they find out.
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
    """Gradients: every rank writes all of it, every rank reads its own slice of everybody's."""


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
    """One flat buffer inside a gather buffer; rank r's slice is `shard_bytes` from start + r * shard_bytes on."""

    start: int
    shard_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """One flat buffer to be reduced: out (+)= sum over ranks of their flat[rank * S : (rank + 1) * S]."""

    flat: Tensor
    """1-D view of a reduce buffer, world_size * S elements, local, in the dtype that travels."""
    out: Tensor
    """1-D, S elements, this rank's slice of the sum, possibly of another dtype; may be `flat`'s own slice."""
    accumulate: bool
    """Add to `out` instead of overwriting it."""
    scale: float = 1.0
    """What the sum is multiplied by on its way to `out`; 1 where the collectives are not `on_streams`."""


class AllToAllPart(NamedTuple):
    """What one rank sends to another in an `all_to_all`."""

    source: int
    target: int
    nbytes: int


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when the result is in place (a GPU: order the current stream after it). Not collective; idempotent."""


class Finished:
    """A `Work` that was over when it was returned."""

    def wait(self) -> None:
        """Return at once."""


FINISHED = Finished()


class Then:
    """A `Work` in two phases; the second begins when the first is over, which is not before this is waited for."""

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
"""Combines the messages of lower and of higher ranks to one; associative."""


class Collectives(Protocol):
    """A group of ranks that exchange bytes. Sums are taken in rank order, in fp32 or wider, on CPUs; on devices as the
    backend takes them."""

    name: str
    """"streams", "gloo", "shm" or "dry"."""
    rank: int
    """This rank's position in the group."""
    world_size: int
    device: torch.device
    on_streams: bool
    """Work is enqueued for a device, so that each operation costs a launch, whatever its size."""
    process_group: dist.ProcessGroup | None
    """Torch's group of these ranks, if there is one."""
    labels: dict[int, str]
    """The labels in words, for errors; filled by the user of the labels."""

    @property
    def scratch_bytes(self) -> int:
        """This rank's memory beside the buffers: staging, sums under way. Grows to the need of the first step."""

    def allocate(self, nbytes: int, kind: BufferKind) -> Buffer:
        """A new buffer of exactly `nbytes`, in memory rounded up to 64. Contents unspecified."""

    def claim(self, buffer: Buffer) -> None:
        """Wait until this rank may write into `buffer`."""

    def mark(self) -> Work:
        """The work enqueued on the current stream so far. No communication."""

    def writing(self, buffer: Buffer, after: Work = FINISHED) -> AbstractContextManager[None]:
        """Inside, this rank writes its slices into a claimed gather buffer. No communication.

        On streams they are written on one of their own, which waits for the buffer's last reader and for `after`, the
        last write to what the slices are copied from, and for nothing else that computes or is gathered.
        """

    def settle(self) -> None:
        """Order the current stream after every read inside `writing`: what was copied may now be written. No
        communication."""

    def all_gather(self, buffer: Buffer, spans: tuple[FlatSpan, ...], label: int = 0) -> Work:
        """Complete every span of a gather buffer, in place, from the slices that the ranks wrote."""

    def release(self, buffer: Buffer) -> None:
        """This rank has read (or enqueued its last reader of) a gather buffer. Poisons it with 0xFF bytes (NaN in every
        float dtype) when `poison` is set, once no rank can be reading it."""

    def replace(self, buffer: Buffer) -> Buffer:
        """A replacement for `buffer` in its role (same index); the old storage and its contents are left, privately, to
        the holders of views of it on this rank. Not collective. Called between `wait` and `release`; the
        replacement is then the one to be released."""

    def drop(self, buffer: Buffer) -> None:
        """The buffer is not used any more, and nothing of it is under way: its memory goes with the last view. Not
        collective, but every rank drops the same buffers between the same calls."""

    def reduce_scatter(self, buffer: Buffer, reductions: tuple[Reduction, ...], label: int = 0) -> Work:
        """Sum each flat buffer over the ranks, each rank keeping its own slice in `out`."""

    def advance(self) -> None:
        """Go on with reductions under way, as far as this rank need wait for nobody. Not collective."""

    def all_reduce(self, tensor: Tensor, op: str = "sum", after: Work = FINISHED, label: int = 0) -> Work:
        """In place on any contiguous tensor (need not be in a buffer), op "sum" or "max". Large tensors travel as
        reduce-scatter + all-gather. Sums are bit-identical on all ranks. `after`: the work that writes the tensor,
        perhaps in another group; nobody need have waited for it. A CPU rank then begins when this is waited for."""

    def all_to_all(self, buffer: Buffer, parts: tuple[AllToAllPart, ...], into: Tensor, label: int = 0) -> Work:
        """Each rank sends other ranks what they are to have: one part for each, or none.

        Args:
            buffer: a claimed reduce buffer. From its beginning on lie the parts that this rank sends, in the order of
                their targets.
            parts: every part of every rank, by source and then by target; the same on every rank.
            into: 1-D uint8. The parts for this rank arrive here, in the order of their sources."""

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Rank `src`'s contiguous tensor to all, in place; complete on return."""

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def exchange(self, message: bytes, combine: Combine, label: int = 0) -> bytes:
        """Every rank's message, combined in rank order; the same on every rank. Small messages, between hosts: no
        device is waited for. Ranks need not have agreed on anything before, not even on its length."""

    def abandon(self) -> None:
        """This rank raised and leaves the collective it was in: peers that wait for it raise, now or when they come
        here, unless they have abandoned it as well. Not collective; waits for nobody."""

    def close(self) -> None:
        """Give back connections, communicators and shared memory. Idempotent; not collective."""

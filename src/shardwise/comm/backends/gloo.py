"""Collectives by pairwise sends over a torch.distributed process group that can send and receive CPU memory.

Every transfer goes directly from one rank to another, in place, instead of around gloo's rings. A collective begins
with a header that holds its signature: ranks that call different collectives, or the same ones in another order, raise
instead of mixing up data or hanging. Messages carry a tag made from the collective's number in this group and its
signature."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shardwise.comm.all_to_all import AllToAllPart, received_parts, sent_parts
from shardwise.comm.backends.rank_order_sum import RankOrderSum, pieces_of, shares
from shardwise.comm.backends.signature import Reasons, in_words, mismatch, sign
from shardwise.comm.store_channel import timeout_s
from shardwise.errors import CollectiveTimeout, ShardwiseError
from shardwise.fsdp.collectives import (
    FINISHED,
    Buffer,
    ChainedWork,
    Combine,
    FlatSpan,
    PrivateBuffers,
    Reduction,
    Work,
    check_reductions,
    slice_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

STAGING_BYTES = 16 * 2**20
"""Memory that receives peers' slices before they are summed, in two halves: one is filled while the other is read."""
SMALL_BYTES = 32 * 2**10
"""Up to this size, an all_reduce sends everything to every peer, instead of a reduce-scatter and an all-gather."""
AHEAD = 32
"""How many collectives a peer may begin ahead of a rank that fails, which sends a header that says so for each."""


class GlooCollectives(PrivateBuffers):
    """Collectives of CPU ranks on any hosts."""

    name = "gloo"

    def __init__(self, group: dist.ProcessGroup, poison: bool | None = None) -> None:
        """Every rank of the group must call this, in the same order as its other uses of the group."""
        super().__init__(group.rank(), group.size(), "cpu", poison)
        self.process_group = group
        number = _made[group] = _made.get(group, 0) + 1
        self._transport = _Transport(group, number, timedelta(seconds=timeout_s(group)), self.labels, Reasons(group))
        self._peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        self._left: list[_Post] = []
        """The messages of abandoned collectives, kept because gloo may still be sending them."""
        self._sum = RankOrderSum()
        self._staging = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._small = torch.empty(SMALL_BYTES, dtype=torch.uint8, device="cpu")
        self._reducing: Work = FINISHED  # the one reduction that may use the staging memory

    @property
    def scratch_bytes(self) -> int:
        """Bytes of partial sums, staged slices of peers, small messages and headers."""
        return self._sum.scratch_bytes + self._staging.nbytes + self._small.nbytes + self._transport.header_bytes

    @torch.no_grad()
    def all_gather(self, buffer: Buffer, spans: tuple[FlatSpan, ...], label: int = 0) -> Work:
        """Send this rank's slice of each span to every peer, and receive theirs in place."""
        slices = [
            [buffer.bytes[r.start + q * r.shard_bytes :][: r.shard_bytes] for q in range(self.world_size)]
            for r in spans
        ]
        return self._gather(self._post(sign("all_gather", label, buffer.index, spans)), slices)

    @torch.no_grad()
    def reduce_scatter(self, buffer: Buffer, reductions: tuple[Reduction, ...], label: int = 0) -> Work:
        """Send each peer its slice, and sum all ranks' terms of this rank's slice in rank order, piece by piece."""
        check_reductions(reductions, self.world_size, may_scale=False)
        jobs = [
            _ReduceScatter([slice_of(r.flat, q, self.world_size) for q in range(self.world_size)], r.out, r.accumulate)
            for r in reductions
        ]
        what = tuple((r.flat.dtype, r.out.numel()) for r in reductions)
        return self._reduce(self._post(sign("reduce_scatter", label, buffer.index, what)), jobs)

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor, op: str = "sum", after: Work = FINISHED, label: int = 0) -> Work:
        """Up to SMALL_BYTES, send everything to every peer; else do a reduce-scatter and an all-gather."""
        if after is not FINISHED:
            return ChainedWork(after, lambda: self.all_reduce(tensor, op, label=label))
        flat = tensor.detach().view(-1)
        post = self._post(sign("all_reduce", label, flat.numel(), flat.dtype, op))
        if flat.numel() * flat.itemsize <= SMALL_BYTES:
            sent = self._small[: flat.nbytes].view(flat.dtype)  # peers read it while the result is written
            sent.copy_(flat)
            self._reduce(post, [_ReduceScatter([sent] * self.world_size, flat, False, op)]).wait()
            return FINISHED
        parts = shares(flat, self.world_size)
        summed = self._reduce(post, [_ReduceScatter(parts, parts[self.rank], False, op)])
        return ChainedWork(summed, lambda: self._gather(post, [parts]))

    @torch.no_grad()
    def all_to_all(self, buffer: Buffer, parts: tuple[AllToAllPart, ...], into: Tensor, label: int = 0) -> Work:
        """Send each part as one message."""
        post = self._post(sign("all_to_all", label, buffer.index, parts))
        arrivals: list[_Message] = []
        for part, start in received_parts(parts, self.rank):
            arrivals += post.receive(into[start : start + part.nbytes], part.source, "part")
        for part, start in sent_parts(parts, self.rank):
            post.send(buffer.bytes[start : start + part.nbytes], part.target, "part")
        return _Receives(post, arrivals)

    @torch.no_grad()
    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Broadcast along a binomial tree."""
        # Positions in the tree count from `src`: position p receives from p without its lowest set bit.
        flat = tensor.detach().view(-1)
        position = (self.rank - src) % self.world_size
        span = position & -position or 1 << (self.world_size - 1).bit_length()
        above = [(position - span + src) % self.world_size] if position else []
        steps = [span >> k for k in range(1, span.bit_length())]
        below = [(position + step + src) % self.world_size for step in steps if position + step < self.world_size]
        post = _Post(self._transport, sign("broadcast", 0, flat.numel(), flat.dtype, src), below, above)
        for peer in above:
            post.wait(post.receive(flat, peer, 0))
        for peer in below:
            post.send(flat, peer, 0)
        post.wait_sent()

    def barrier(self) -> None:
        """Exchange empty messages."""
        self.exchange(b"", lambda a, b: b"", 0)

    @torch.no_grad()
    def exchange(self, message: bytes, combine: Combine, label: int = 0) -> bytes:
        """Send the message to every peer, and combine all messages."""
        post = self._post(sign("exchange", label), len(message))
        mine = torch.frombuffer(bytearray(message or b" "), dtype=torch.uint8)[: len(message)]
        for peer in self._peers:
            post.send(mine, peer, "said")
        said = [message] * self.world_size
        for peer, length in post.lengths().items():
            theirs = bytearray(length or 1)
            post.wait(post.receive(torch.frombuffer(theirs, dtype=torch.uint8)[:length], peer, "said"))
            said[peer] = bytes(theirs[:length])
        post.wait_sent()
        while self._left:  # peers have left these collectives behind
            self._left.pop().wait_sent()
        self._transport.reasons.forget()
        return functools.reduce(combine, said)

    def abandon(self, reason: str = "") -> None:
        """Send every peer an abandon header, which says that this rank raised."""
        if self._transport.failure is None:  # else `fail` has told the peers
            self._transport.reasons.tell(reason)
            self._left.append(self._post(sign("abandon")))

    def _post(self, signature: int, length: int = 0) -> _Post:
        return _Post(self._transport, signature, self._peers, self._peers, length)

    def _gather(self, post: _Post, slices: Sequence[Sequence[Tensor]]) -> Work:
        arrivals: list[_Message] = []
        for number, by_rank in enumerate(slices):
            for peer in self._peers:
                arrivals += post.receive(by_rank[peer], peer, ("gather", number))
            for peer in self._peers:
                post.send(by_rank[self.rank], peer, ("gather", number))
        return _Receives(post, arrivals)

    def _reduce(self, post: _Post, jobs: list[_ReduceScatter]) -> Work:
        self._reducing.wait()
        if not self._staging.numel():
            with torch.inference_mode(False):
                self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, device="cpu")
        self._reducing = _Reduce(post, jobs, self.rank, self._staging, self._sum)
        return self._reducing


_made: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""By process group: how many `GlooCollectives` were made for it so far. The same on each of its ranks."""
_last_messages: WeakKeyDictionary[dist.ProcessGroup, list[object]] = WeakKeyDictionary()
"""Messages still being sent after a failure. gloo drops those that nobody holds, and the model may be freed at once."""


@dataclass(frozen=True, slots=True)
class _Message:
    work: dist.Work
    peer: int


@dataclass(slots=True, eq=False)
class _Transport:
    """What all messages of one `GlooCollectives` share: group, timeout, labels, headers and the first failure."""

    group: dist.ProcessGroup
    number: int
    """Position of this `GlooCollectives` among all that were made for the process group."""
    timeout: timedelta
    labels: dict[int, str]
    reasons: Reasons
    sequence: int = 0
    """Number of collectives so far."""
    failure: ShardwiseError | None = None
    """The error of the first call that failed. Ranks are out of step then, so all later calls raise it at once."""

    free_headers: list[Tensor] = field(default_factory=list)
    """[world_size, 2] int64 each: headers of completed collectives, reused so that steady state allocates nothing."""
    header_bytes: int = 0
    """Bytes of all headers allocated."""

    def fail(self, error: ShardwiseError) -> ShardwiseError:
        """Remember the first error, and tell peers: they may wait in collectives that this rank will not call, and
        would run into their timeouts. Returns the error, to be raised."""
        if self.failure is None:
            self.failure = type(error)(*error.args)  # not the error itself: its traceback would keep the model alive
            self.reasons.tell(f"{type(error).__name__}: {error}")
            header = torch.tensor([sign("fail"), 0], dtype=torch.int64, device="cpu")
            messages = _last_messages.setdefault(self.group, [])
            messages.append(header)
            for sequence in range(self.sequence + 1, self.sequence + 1 + AHEAD):
                for peer in range(self.group.size()):
                    if peer != self.group.rank():
                        with contextlib.suppress(RuntimeError):  # the peer is gone
                            messages.append(self.group.send(*self.header(header, peer, sequence)))
        return error

    def header(self, header: Tensor, peer: int, sequence: int) -> tuple[list[Tensor], int, int]:
        """Return the arguments of `send` and `recv` for the header of a collective."""
        return [header], peer, _tag("header", self.number, sequence)

    def headers(self) -> Tensor:
        """Return memory for a collective's headers, by rank. Afterwards the caller appends it to `free_headers`."""
        if not self.free_headers:
            with torch.inference_mode(False):
                self.free_headers.append(torch.empty(self.group.size(), 2, dtype=torch.int64, device="cpu"))
            self.header_bytes += self.free_headers[0].nbytes
        return self.free_headers.pop()


class _Post:
    """The messages of one collective: sends and receives them, and turns their failures into typed errors."""

    def __init__(
        self, transport: _Transport, signature: int, to: Sequence[int], hears: Sequence[int], length: int = 0
    ) -> None:
        """Send the header to the peers in `to`, and start to receive one from each peer in `hears`."""
        self.world_size = transport.group.size()
        self._transport = transport
        self._rank = transport.group.rank()
        self._signature = signature
        transport.sequence += 1
        self._sequence = transport.sequence
        self._sent: list[_Message] = []
        self._hears = hears
        self._headers: Tensor | None = transport.headers()
        self._headers.numpy()[self._rank] = signature, length
        mine = self._headers[self._rank]
        self._unread = [self._receive(self._headers[peer], peer) for peer in hears]
        for peer in to:
            self._sent.append(
                _Message(self._try(peer, transport.group.send, *transport.header(mine, peer, self._sequence)), peer)
            )

    def send(self, tensor: Tensor, peer: int, part: object) -> None:
        if tensor.numel():
            work = self._try(peer, self._transport.group.send, *self._letter(tensor, peer, part))
            self._sent.append(_Message(work, peer))

    def receive(self, tensor: Tensor, peer: int, part: object) -> list[_Message]:
        if not tensor.numel():
            return []
        return [_Message(self._try(peer, self._transport.group.recv, *self._letter(tensor, peer, part)), peer)]

    def lengths(self) -> dict[int, int]:
        """Wait for the peers' headers, and return the length in bytes that each gives for the message after it.

        Raises:
            MismatchError: a peer called another collective.
        """
        self._read_headers()
        assert self._headers is not None
        return {peer: int(self._headers.numpy()[peer, 1]) for peer in self._hears}

    def wait(self, arrivals: Sequence[_Message]) -> None:
        self._read_headers()
        for message in arrivals:
            self._try(message.peer, message.work.wait, self._transport.timeout)

    def wait_sent(self) -> None:
        self._read_headers()
        for message in self._sent:
            self._try(message.peer, message.work.wait, self._transport.timeout)
        self._sent.clear()
        if self._headers is not None:
            self._transport.free_headers.append(self._headers)
            self._headers = None

    def _read_headers(self) -> None:
        unread, self._unread = self._unread, []
        for message in unread:
            self._try(message.peer, message.work.wait, self._transport.timeout)
            assert self._headers is not None
            theirs = int(self._headers.numpy()[message.peer, 0])
            if theirs != self._signature:
                transport = self._transport
                here, there = (self._rank, self._signature), (message.peer, theirs)
                raise transport.fail(mismatch(*here, *there, transport.labels, transport.reasons.of))

    def _receive(self, header: Tensor, peer: int) -> _Message:
        transport = self._transport
        return _Message(self._try(peer, transport.group.recv, *transport.header(header, peer, self._sequence)), peer)

    def _letter(self, tensor: Tensor, peer: int, part: object) -> tuple[list[Tensor], int, int]:
        what = (self._transport.number, self._sequence, self._signature, part, tensor.nbytes)
        return [tensor.view(torch.uint8)], peer, _tag(*what)

    def _try(self, peer: int, call: Callable[..., Any], *arguments: Any) -> Any:
        if self._transport.failure is not None:
            raise type(self._transport.failure)(*self._transport.failure.args)
        try:
            return call(*arguments)
        except RuntimeError as error:
            what = in_words(self._signature, self._transport.labels)
            raise self._transport.fail(
                CollectiveTimeout(
                    f"{what} (number {self._sequence} of its group) on rank {self._rank}: no message from rank {peer}, "
                    f"whose process ended or hangs ({error})"
                )
            ) from error


def _tag(*label: object) -> int:
    return zlib.crc32(repr(label).encode()) & 0x7FFFFFFF


class _Receives:
    """A `Work` whose messages are received in their final place."""

    def __init__(self, post: _Post, arrivals: list[_Message]) -> None:
        self._post = post
        self._arrivals = arrivals

    def wait(self) -> None:
        self._post.wait(self._arrivals)
        self._post.wait_sent()
        self._arrivals = []


@dataclass(frozen=True, slots=True)
class _ReduceScatter:
    """One reduction: rank q receives the sum over ranks of their parts[q], in its `out`."""

    parts: Sequence[Tensor]
    out: Tensor
    accumulate: bool
    op: str = "sum"


@dataclass(frozen=True, slots=True)
class _ReduceChunk:
    """A piece of a job that fits half of the staging memory: this rank's term, the output, the messages' label."""

    own: Tensor
    out: Tensor
    job: _ReduceScatter
    part: tuple[str, int, int]


class _Reduce:
    """Reductions under way. All sends are posted at once; two pieces at a time are being received or summed."""

    def __init__(self, post: _Post, jobs: list[_ReduceScatter], rank: int, staging: Tensor, add: RankOrderSum) -> None:
        self._post = post
        self._rank = rank
        self._halves = staging.view(2, -1)
        self._row_bytes = self._halves.shape[1] // max(1, post.world_size - 1) // 64 * 64
        self._sum = add
        self._pieces: list[_ReduceChunk] = []
        for number, job in enumerate(jobs):
            width = self._row_bytes // job.parts[0].itemsize
            for peer, theirs in enumerate(job.parts):
                for index, piece in enumerate(pieces_of(theirs, width)):
                    if peer != rank:
                        post.send(piece, peer, ("reduce", number, index))
            for index, (own, out) in enumerate(
                zip(pieces_of(job.parts[rank], width), pieces_of(job.out, width), strict=True)
            ):
                self._pieces.append(_ReduceChunk(own, out, job, ("reduce", number, index)))
        self._arrivals = [self._receive(k) for k in range(min(2, len(self._pieces)))]

    def wait(self) -> None:
        for k in range(len(self._pieces)):
            terms, messages = self._arrivals[k]
            piece = self._pieces[k]
            self._post.wait(messages)
            self._sum(terms, piece.out, piece.job.accumulate, piece.job.op)
            if k + 2 < len(self._pieces):  # its half of the staging memory is free only now
                self._arrivals.append(self._receive(k + 2))
        self._post.wait_sent()
        self._pieces.clear()

    def _receive(self, k: int) -> tuple[list[Tensor], list[_Message]]:
        piece, half = self._pieces[k], self._halves[k % 2]
        terms: list[Tensor] = []
        messages: list[_Message] = []
        for rank in range(self._post.world_size):
            if rank == self._rank:
                terms.append(piece.own)
                continue
            row = (rank - (rank > self._rank)) * self._row_bytes
            term = half[row : row + piece.own.numel() * piece.own.itemsize].view(piece.own.dtype)
            messages += self._post.receive(term, rank, piece.part)
            terms.append(term)
        return terms, messages

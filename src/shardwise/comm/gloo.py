"""Pairwise exchange over a torch.distributed process group that can send and receive CPU memory.

Every transfer goes straight from one rank to another, in place, instead of around gloo's rings. Messages carry a tag
made of the collective's number in this group and of what it is, so that ranks that call different things, or the same
things in another order, time out instead of swapping data.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.comm.buffers import PrivateBuffers, check_reductions, pieces_of, shares, slice_of
from shardwise.comm.protocol import FINISHED, Buffer, Reduction, Region, Then, Work
from shardwise.comm.summation import RankOrderSum
from shardwise.errors import CollectiveTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

STAGING_BYTES = 16 * 2**20
"""Where peers' slices arrive before they are summed; two halves, so that one fills while the other is read."""
SMALL_BYTES = 32 * 2**10
"""An all_reduce of up to this much is one exchange of everything instead of a reduce-scatter and an all-gather."""


class GlooCollectives(PrivateBuffers):
    """CPU ranks on any hosts."""

    name = "gloo"

    def __init__(self, group: dist.ProcessGroup, poison: bool | None = None) -> None:
        super().__init__(group.rank(), group.size(), "cpu", poison)
        self._group = group
        self._peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        self._sequence = 0
        self._sum = RankOrderSum()
        self._staging = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._small = torch.empty(SMALL_BYTES, dtype=torch.uint8, device="cpu")
        self._reducing: Work = FINISHED  # the one reduction that may be using the staging memory

    @property
    def scratch_bytes(self) -> int:
        return self._sum.scratch_bytes + self._staging.nbytes + self._small.nbytes

    @torch.no_grad()
    def all_gather(self, buffer: Buffer, regions: tuple[Region, ...]) -> Work:
        slices = [
            [buffer.bytes[r.start + q * r.shard_bytes :][: r.shard_bytes] for q in range(self.world_size)]
            for r in regions
        ]
        return self._gather(self._post(f"all_gather of buffer {buffer.index}"), slices)

    @torch.no_grad()
    def reduce_scatter(self, buffer: Buffer, reductions: tuple[Reduction, ...]) -> Work:
        check_reductions(reductions, self.world_size)
        jobs = [
            _Job([slice_of(r.flat, q, self.world_size) for q in range(self.world_size)], r.out, r.accumulate)
            for r in reductions
        ]
        return self._reduce(self._post(f"reduce_scatter of buffer {buffer.index}"), jobs)

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor, op: str = "sum", after: Work = FINISHED) -> Work:
        if after is not FINISHED:
            return Then(after, lambda: self.all_reduce(tensor, op))
        flat = tensor.detach().view(-1)
        post = self._post(f"all_reduce ({op})")
        if flat.numel() * flat.itemsize <= SMALL_BYTES:
            sent = self._small[: flat.nbytes].view(flat.dtype)  # peers read it while the result is written
            sent.copy_(flat)
            self._reduce(post, [_Job([sent] * self.world_size, flat, False, op)]).wait()
            return FINISHED
        parts = shares(flat, self.world_size)
        summed = self._reduce(post, [_Job(parts, parts[self.rank], False, op)])
        return Then(summed, lambda: self._gather(post, [parts]))

    @torch.no_grad()
    def broadcast(self, tensor: Tensor, src: int) -> None:
        # A binomial tree over positions counted from `src`: position p hears from p without its lowest set bit.
        flat, post = tensor.detach().view(-1), self._post(f"broadcast from rank {src}")
        position = (self.rank - src) % self.world_size
        span = position & -position or 1 << (self.world_size - 1).bit_length()
        if position:
            post.wait(post.receive(flat, (position - span + src) % self.world_size, 0))
        while span := span >> 1:
            if position + span < self.world_size:
                post.send(flat, (position + span + src) % self.world_size, 0)
        post.wait_sent()

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1, device="cpu"))

    def _post(self, op: str) -> _Post:
        self._sequence += 1
        return _Post(self._group, op, self._sequence)

    def _gather(self, post: _Post, slices: Sequence[Sequence[Tensor]]) -> Work:
        arrivals: list[_Message] = []
        for number, by_rank in enumerate(slices):
            for peer in self._peers:
                arrivals += post.receive(by_rank[peer], peer, ("gather", number))
            for peer in self._peers:
                post.send(by_rank[self.rank], peer, ("gather", number))
        return _Arrivals(post, arrivals)

    def _reduce(self, post: _Post, jobs: list[_Job]) -> Work:
        self._reducing.wait()
        if not self._staging.numel():
            with torch.inference_mode(False):
                self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, device="cpu")
        self._reducing = _Reduce(post, jobs, self.rank, self._staging, self._sum)
        return self._reducing


@dataclass(frozen=True, slots=True)
class _Message:
    work: dist.Work
    peer: int


class _Post:
    """The messages of one collective: numbers and posts them, and turns their failures into CollectiveTimeout."""

    def __init__(self, group: dist.ProcessGroup, op: str, sequence: int) -> None:
        self.world_size = group.size()
        self._group = group
        self._op = op
        self._sequence = sequence
        self._sent: list[_Message] = []

    def send(self, tensor: Tensor, peer: int, part: object) -> None:
        if tensor.numel():
            self._sent.append(_Message(self._try(peer, self._group.send, *self._letter(tensor, peer, part)), peer))

    def receive(self, tensor: Tensor, peer: int, part: object) -> list[_Message]:
        if not tensor.numel():
            return []
        return [_Message(self._try(peer, self._group.recv, *self._letter(tensor, peer, part)), peer)]

    def wait(self, arrivals: Sequence[_Message]) -> None:
        for message in arrivals:
            self._try(message.peer, message.work.wait)

    def wait_sent(self) -> None:
        self.wait(self._sent)
        self._sent.clear()

    def _letter(self, tensor: Tensor, peer: int, part: object) -> tuple[list[Tensor], int, int]:
        label = (self._sequence, self._op, part, tensor.numel(), tensor.itemsize)
        return [tensor.view(torch.uint8)], peer, zlib.crc32(repr(label).encode()) & 0x7FFFFFFF

    def _try(self, peer: int, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except RuntimeError as error:
            raise CollectiveTimeout(
                f"{self._op} (number {self._sequence} of its group) on rank {self._group.rank()}: nothing from rank "
                f"{peer}. It is gone, or it is at another collective. ({error})"
            ) from error


class _Arrivals:
    """Messages that land where they belong."""

    def __init__(self, post: _Post, arrivals: list[_Message]) -> None:
        self._post = post
        self._arrivals = arrivals

    def wait(self) -> None:
        self._post.wait(self._arrivals)
        self._post.wait_sent()
        self._arrivals = []


@dataclass(frozen=True, slots=True)
class _Job:
    """Rank q is to have, in its `out`, the sum over ranks of parts[q]."""

    parts: Sequence[Tensor]
    out: Tensor
    accumulate: bool
    op: str = "sum"


@dataclass(frozen=True, slots=True)
class _Piece:
    """As much of a job as fits half of the staging memory: this rank's term, the result and the label on the wire."""

    own: Tensor
    out: Tensor
    job: _Job
    part: tuple[str, int, int]


class _Reduce:
    """Reductions under way. All sends are posted at once; two pieces at a time are arriving or being summed."""

    def __init__(self, post: _Post, jobs: list[_Job], rank: int, staging: Tensor, add: RankOrderSum) -> None:
        self._post = post
        self._rank = rank
        self._halves = staging.view(2, -1)
        self._row_bytes = self._halves.shape[1] // max(1, post.world_size - 1) // 64 * 64
        self._sum = add
        self._pieces: list[_Piece] = []
        for number, job in enumerate(jobs):
            width = self._row_bytes // job.parts[0].itemsize
            for peer, theirs in enumerate(job.parts):
                for index, piece in enumerate(pieces_of(theirs, width)):
                    if peer != rank:
                        post.send(piece, peer, ("reduce", number, index))
            for index, (own, out) in enumerate(
                zip(pieces_of(job.parts[rank], width), pieces_of(job.out, width), strict=True)
            ):
                self._pieces.append(_Piece(own, out, job, ("reduce", number, index)))
        self._arrivals = [self._receive(k) for k in range(min(2, len(self._pieces)))]

    def wait(self) -> None:
        for k in range(len(self._pieces)):
            terms, messages = self._arrivals[k]
            piece = self._pieces[k]
            self._post.wait(messages)
            self._sum(terms, piece.out, piece.job.accumulate, piece.job.op)
            if k + 2 < len(self._pieces):  # its half is free only now
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

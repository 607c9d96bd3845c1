"""The collectives of torch.distributed on CPUs, each called as it is and begun asynchronously.

gloo sums in the dtype of the tensors and knows few of them, so terms are widened before they are sent: floats to fp32
at least, small integers to int64. It decides in which order terms are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.buffers import (
    PrivateBuffers,
    check_reductions,
    deliver,
    received_parts,
    sent_parts,
    slice_of,
)
from shardwise.comm.channel import Channel, StoreChannel
from shardwise.comm.protocol import FINISHED, AllToAllPart, Buffer, ChainedWork, Combine, FlatSpan, Reduction, Work

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
        channel: Callable[[dist.ProcessGroup, dict[int, str]], Channel] = StoreChannel,
    ) -> None:
        """Every rank of the group must call this.

        Args:
            group: the ranks' process group; it must have a backend for the device.
            device: this rank's device.
            poison: fill released buffers with 0xFF bytes; None: as the environment says.
            channel: makes the channel for `exchange`, from the group and the labels in words.
        """
        super().__init__(group.rank(), group.size(), device, poison)
        self.process_group = group
        self._group = group
        self._channel = channel(group, self.labels)

    def all_gather(self, buffer: Buffer, spans: tuple[FlatSpan, ...], label: int = 0) -> Work:
        """Gather each span in place."""
        wholes = [buffer.bytes[span.start :][: span.shard_bytes * self.world_size] for span in spans]
        return _Begun(
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
        return _Begun(works, partial(self._deliver, reductions, sums))

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor, op: str = "sum", after: Work = FINISHED, label: int = 0) -> Work:
        """Reduce in place, or in a wider dtype and then back."""
        if after is not FINISHED:
            return ChainedWork(after, lambda: self.all_reduce(tensor, op, label=label))
        flat = real(tensor.detach()).view(-1)
        moving = _widened(flat)
        work = dist.all_reduce(moving, OPS[op], group=self._group, async_op=True)
        return _Begun([work], None if moving is flat else partial(flat.copy_, moving))

    @torch.no_grad()
    def all_to_all(self, buffer: Buffer, parts: tuple[AllToAllPart, ...], into: Tensor, label: int = 0) -> Work:
        """Exchange the parts."""
        sent, received = self.sizes(parts)
        outgoing = buffer.bytes[: sum(sent)]
        return _Begun([dist.all_to_all_single(into, outgoing, received, sent, group=self._group, async_op=True)])

    @torch.no_grad()
    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Broadcast the tensor's bytes; on a device, on the current stream."""
        dist.broadcast(tensor.detach().view(-1).view(torch.uint8), group=self._group, group_src=src)

    def barrier(self) -> None:
        """Wait on the host until every rank has called this."""
        dist.barrier(self._group)

    def exchange(self, message: bytes, combine: Combine, label: int = 0) -> bytes:
        """Exchange through the channel between hosts. Waits for no device."""
        return self._channel.exchange(message, combine, label)

    def abandon(self, reason: str = "") -> None:
        """Tell peers through the channel."""
        self._channel.abandon(reason)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def sizes(self, parts: tuple[AllToAllPart, ...]) -> tuple[list[int], list[int]]:
        """Return the bytes that this rank sends to each rank and receives from each, in rank order."""
        sent, received = [0] * self.world_size, [0] * self.world_size
        for part, _ in sent_parts(parts, self.rank):
            sent[part.target] = part.nbytes
        for part, _ in received_parts(parts, self.rank):
            received[part.source] = part.nbytes
        return sent, received

    def _deliver(self, reductions: Sequence[Reduction], sums: Sequence[Tensor]) -> None:
        for r, summed in zip(reductions, sums, strict=True):
            deliver(torch.view_as_complex(summed.view(-1, 2)) if r.flat.is_complex() else summed, r, self._factors)


class _Begun:
    """Work of torch.distributed that has begun, and what remains to be done on this rank when it is complete."""

    def __init__(self, works: Sequence[dist.Work], finish: Callable[[], object] | None = None) -> None:
        self._works = works
        self._finish = finish

    @torch.no_grad()
    def wait(self) -> None:
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

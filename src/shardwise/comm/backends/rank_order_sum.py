"""Sums over ranks, in rank order and in fp32 or wider, without allocation; and how flat tensors are cut for them.

So a sum depends neither on timing nor on the rank that computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.fsdp.gradients import CHUNK_NUMEL, Scratch

_COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum}


def shares(flat: Tensor, world_size: int) -> list[Tensor]:
    """Cut a 1-D tensor into `world_size` consecutive parts of equal size; the last ones may be shorter or empty."""
    numel = -(-flat.numel() // world_size)
    return [flat[rank * numel : (rank + 1) * numel] for rank in range(world_size)]


def pieces_of(flat: Tensor, numel: int) -> list[Tensor]:
    """Cut a 1-D tensor into consecutive pieces of `numel`; the last may be shorter. No pieces if it is empty."""
    return [flat[start : start + numel] for start in range(0, flat.numel(), numel)]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which terms of `dtype` are summed: fp32 for narrower floats, else `dtype`."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


class RankOrderSum:
    """Combines one piece of each rank as ((p0 + p1) + p2) + ..., each widened first, cast once at the end.

    Holds two chunks of scratch memory at most.
    """

    def __init__(self) -> None:
        self._total, self._widened = Scratch(), Scratch()

    @torch.no_grad()
    def __call__(self, pieces: Sequence[Tensor], out: Tensor, accumulate: bool = False, op: str = "sum") -> None:
        """Compute out[:] = (out if accumulate else 0) + the pieces combined, one 1-D tensor of each rank, in rank
        order.

        `out` may be one of the pieces. The sum is complete before it is added to `out`.
        """
        combine = _COMBINE[op]
        for start in range(0, out.numel(), CHUNK_NUMEL):
            part = slice(start, start + CHUNK_NUMEL)
            self._sum_chunk([piece[part] for piece in pieces], out[part], accumulate, combine)

    def _sum_chunk(self, pieces: list[Tensor], out: Tensor, accumulate: bool, combine: Callable[..., Tensor]) -> None:
        wide = accumulation_dtype(pieces[0].dtype)
        total, widened = self._total(wide, out.numel()), self._widened(wide, out.numel())
        running = _widen(pieces[0], total)
        for position, piece in enumerate(pieces[1:], start=2):
            # Only the last addition may write to `out`, which can be a piece that is still to be read.
            ends_here = position == len(pieces) and out.dtype == wide and not accumulate
            running = combine(running, _widen(piece, widened), out=out if ends_here else total)
        if accumulate and wide.is_floating_point and out.itemsize < wide.itemsize:
            # Like `out.add_`, which would allocate memory to cast `out`.
            out.copy_(torch.add(running, _widen(out, widened), out=total))
        elif accumulate:
            out.add_(running)
        elif running is not out:
            out.copy_(running)

    @property
    def scratch_bytes(self) -> int:
        """Bytes held now."""
        return self._total.nbytes + self._widened.nbytes


def _widen(piece: Tensor, scratch: Tensor) -> Tensor:
    return piece if piece.dtype == scratch.dtype else scratch.copy_(piece)

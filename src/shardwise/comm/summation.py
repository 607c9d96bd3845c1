"""Sums over ranks, in rank order and in fp32 or wider: a result depends neither on timing nor on who computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

CHUNK_NUMEL = 256 * 1024
"""Elements summed at a time: one wide chunk and its inputs stay in a core's cache."""

_COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that terms of `dtype` are summed in: fp32 for narrower floats, else their own."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


class RankOrderSum:
    """Combines one piece per rank as ((p0 + p1) + p2) + ..., each widened first, cast once at the end.

    Holds the scratch memory that it has needed so far, two chunks at most, so that a steady step allocates nothing.
    """

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def __call__(self, pieces: Sequence[Tensor], out: Tensor, accumulate: bool = False, op: str = "sum") -> None:
        """out[:] = (out if accumulate else 0) + the pieces, one 1-D tensor a rank, in rank order.

        `out` may be one of the pieces. The sum is formed before it is added to `out`.
        """
        combine = _COMBINE[op]
        for start in range(0, out.numel(), CHUNK_NUMEL):
            part = slice(start, start + CHUNK_NUMEL)
            self._sum_chunk([piece[part] for piece in pieces], out[part], accumulate, combine)

    def _sum_chunk(self, pieces: list[Tensor], out: Tensor, accumulate: bool, combine: Callable[..., Tensor]) -> None:
        wide = accumulation_dtype(pieces[0].dtype)
        total, widened = (memory[: out.numel()] for memory in self._scratch_for(wide, out.numel()))
        running = _widen(pieces[0], total)
        for position, piece in enumerate(pieces[1:], start=2):
            # Only the last addition may land in `out`: it can be a piece that is still to be read.
            ends_here = position == len(pieces) and out.dtype == wide and not accumulate
            running = combine(running, _widen(piece, widened), out=out if ends_here else total)
        if accumulate and wide.is_floating_point and out.itemsize < wide.itemsize:
            # As `out.add_` would, but that casts `out` into memory of its own.
            out.copy_(torch.add(running, _widen(out, widened), out=total))
        elif accumulate:
            out.add_(running)
        elif running is not out:
            out.copy_(running)

    @property
    def scratch_bytes(self) -> int:
        """What it holds by now."""
        return sum(2 * total.nbytes for total, _ in self._scratch.values())

    def _scratch_for(self, dtype: torch.dtype, numel: int) -> tuple[Tensor, Tensor]:
        if dtype not in self._scratch or self._scratch[dtype][0].numel() < numel:
            with torch.inference_mode(False):
                one, other = (torch.empty(numel, dtype=dtype, device="cpu") for _ in range(2))
                self._scratch[dtype] = (one, other)
        return self._scratch[dtype]


def _widen(piece: Tensor, scratch: Tensor) -> Tensor:
    return piece if piece.dtype == scratch.dtype else scratch.copy_(piece)

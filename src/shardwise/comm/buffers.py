"""Buffers in memory of this process alone, and small functions on tensors that all implementations use."""

from __future__ import annotations

import itertools
import os
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.protocol import FINISHED, AllToAllPart, Buffer, BufferKind, Reduction, Work

ALIGNMENT_BYTES = 64
_FP32_BYTES = 4
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

    @property
    def scratch_bytes(self) -> int:
        """0: this class has no scratch memory."""
        return 0

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
    means = all(r.scale == 1.0 / world_size and r.out.itemsize >= _FP32_BYTES for r in reductions)
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


def sent_parts(parts: tuple[AllToAllPart, ...], rank: int) -> list[tuple[AllToAllPart, int]]:
    """Return the parts that `rank` sends in an `all_to_all`, each with its start in that rank's buffer, in bytes."""
    return _behind_one_another([part for part in parts if part.source == rank])


def received_parts(parts: tuple[AllToAllPart, ...], rank: int) -> list[tuple[AllToAllPart, int]]:
    """Return the parts that `rank` receives in an `all_to_all`, each with its start in `into`, in bytes."""
    return _behind_one_another([part for part in parts if part.target == rank])


def _behind_one_another(parts: list[AllToAllPart]) -> list[tuple[AllToAllPart, int]]:
    starts = [0, *itertools.accumulate(part.nbytes for part in parts)]
    return list(zip(parts, starts[:-1], strict=True))

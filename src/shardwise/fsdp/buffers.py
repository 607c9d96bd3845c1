"""What each implementation of the collectives needs on its own rank: buffers in memory of this process, checks of
arguments, and sums of gradients without allocation."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.fsdp.collectives import FINISHED, AllToAllPart, Buffer, BufferKind, Reduction, Work

# Memory ---------------------------------------------------------------------------------------------------------------

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


# Sums of gradients ----------------------------------------------------------------------------------------------------

# A gradient and the buffer that it is added to may differ in dtype. A CPU operation on two dtypes allocates memory for
# the operand that it casts, and one with `out=` of another dtype computes in the inputs' dtype: 1/3 of a bf16 gradient
# would be rounded to bf16 before it is written to an fp32 buffer. Therefore casts go through scratch memory, a chunk at
# a time.

CHUNK_NUMEL = 256 * 1024
"""Elements summed or cast at a time, so that one wide chunk and its inputs stay in a core's cache."""

LEAST_BATCH_BYTES = 16 * 2**20
"""Bytes of gradients that may wait for one launch of copies on a device, however small their unit. Copying this much
takes about 15 us, which hides a launch."""
MOST_BATCH_BYTES = 256 * 2**20
"""Bytes of gradients that may wait, however large their unit: of a whole model that is one unit, for example."""
_BATCH_SHARE = 2
"""Between the two, the part of a slot's gradients that may wait, as a divisor."""
_LARGE_SHARE = 3
"""The part of what may wait, as a divisor, from which a gradient is large: it is copied at once, with all that wait.
Large ones (a transformer's MLP) tend to come first in a unit's backward, when most activations still exist, and small
ones last, when they cost nothing at the peak."""


class Scratch:
    """Scratch memory by dtype, as large as the largest request so far, so that steady-state steps allocate nothing."""

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, Tensor] = {}

    def __call__(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Return `numel` elements, 1-D, on the CPU. They are valid until the next call with the same dtype."""
        if dtype not in self._memory or self._memory[dtype].numel() < numel:
            with torch.inference_mode(False):
                self._memory[dtype] = torch.empty(numel, dtype=dtype, device="cpu")
        return self._memory[dtype][:numel]

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(memory.nbytes for memory in self._memory.values())


class ScaledAddition:
    """Computes target (+)= scale * source. Tensors must not require gradients: then autograd records nothing, and no
    mode has to be switched.

    This is how CPU ranks collect gradients: each is scaled while it is copied and so is in a core's cache.
    """

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._factors: dict[torch.dtype, Tensor] = {}
        self._memory = Scratch()

    @property
    def scratch_bytes(self) -> int:
        """Bytes held now."""
        return self._memory.nbytes + sum(factor.nbytes for factor in self._factors.values())

    def write(self, target: Tensor, source: Tensor) -> None:
        """Compute target[:] = scale * source in the wider dtype of the two, rounded once."""
        dtype = target.dtype
        if source.dtype == dtype:
            factor = self._factors.get(dtype)
            if factor is None:
                factor = self._factor(dtype)
            # Multiplying by a factor that is itself rounded to a narrow dtype would round twice.
            if dtype.itemsize >= _FP32_BYTES or factor.item() == self._scale:
                torch.mul(source, factor, out=target)
                return
        wide = torch.promote_types(target.dtype, source.dtype)
        if target.dtype == wide != source.dtype:
            target.copy_(source)
            target.mul_(self._factor(wide))
        else:
            wide = torch.promote_types(wide, torch.float32)
            for part, term in _chunks(target, source):
                part.copy_(self._memory(wide, term.numel()).copy_(term).mul_(self._factor(wide)))

    def add(self, target: Tensor, source: Tensor) -> None:
        """Compute target += scale * source in the wider dtype of the two."""
        self._add(target, source, self._scale)

    def flush(self) -> None:
        """Finish all writes: when this returns, every source is in its target."""

    def scale_of_sum(self, dtype: torch.dtype) -> float:
        """Return the factor by which sums of targets over ranks still have to be multiplied."""
        return 1.0

    def settle(self, total: Tensor, summed: Tensor, accumulate: bool) -> None:
        """Compute total[:] = (total if accumulate else 0) + summed; `summed` is a sum of targets over ranks."""
        if accumulate:
            self._add(total, summed, 1.0)
        else:
            total.copy_(summed)

    def _add(self, target: Tensor, source: Tensor, scale: float) -> None:
        if target.dtype == source.dtype:
            target.add_(source, alpha=scale)
            return
        wide = torch.promote_types(target.dtype, source.dtype)
        for part, term in _chunks(target, source):
            if part.dtype == wide:
                part.add_(self._memory(wide, term.numel()).copy_(term), alpha=scale)
            else:
                total = self._memory(wide, part.numel()).copy_(part)
                part.copy_(total.add_(term, alpha=scale))

    def _factor(self, dtype: torch.dtype) -> Tensor:
        """Return the scale as a 0-d CPU tensor: with a Python number, torch would create one in each call."""
        if dtype not in self._factors:
            with torch.inference_mode(False):
                self._factors[dtype] = torch.tensor(self._scale, dtype=dtype, device="cpu")
        return self._factors[dtype]


class BatchedAddition(ScaledAddition):
    """The same for an accelerator, where each operation costs a launch: one launch copies several gradients, and none
    scales them.

    Sources are only remembered, and so keep their memory, until a large one comes, they add up to half of their slot
    (within LEAST_BATCH_BYTES and MOST_BATCH_BYTES), or `flush` is called. So a unit takes a few launches, and what
    waits is little beside its slot and beside activations. Instead of the gradients, sums over ranks are scaled, which
    have only 1 / world_size as many elements; except in fp16, where unscaled sums could overflow.
    """

    def __init__(self, scale: float) -> None:
        super().__init__(scale)
        self._waiting: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        """Targets and sources, by the dtypes of both: torch copies lists of mixed dtypes one tensor at a time."""
        self._waiting_bytes = 0
        self._device_factors = ScaleFactors()

    def write(self, target: Tensor, source: Tensor) -> None:
        """Compute target[:] = source; in fp16, scale * source. It may be written only in `flush`."""
        if target.dtype == torch.float16:
            torch.mul(source, self._scale, out=target)
            return
        targets, sources = self._waiting.setdefault((target.dtype, source.dtype), ([], []))
        targets.append(target)
        sources.append(source)
        self._waiting_bytes += source.nbytes
        limit_bytes = _limit_bytes(target, source)
        large_bytes = max(LEAST_BATCH_BYTES, limit_bytes // _LARGE_SHARE)
        if self._waiting_bytes >= limit_bytes or source.nbytes >= large_bytes:
            self.flush()

    def add(self, target: Tensor, source: Tensor) -> None:
        """Compute target += source; in fp16, target += scale * source."""
        self.flush()  # the target may still have to be written
        target.add_(source, alpha=self._scale if target.dtype == torch.float16 else 1.0)

    def flush(self) -> None:
        """Write all remembered sources to their targets, in one operation for each pair of dtypes."""
        for targets, sources in self._waiting.values():
            torch._foreach_copy_(targets, sources)
        self._waiting.clear()
        self._waiting_bytes = 0

    def scale_of_sum(self, dtype: torch.dtype) -> float:
        """Return the scale; 1 in fp16."""
        return 1.0 if dtype == torch.float16 else self._scale

    def settle(self, total: Tensor, summed: Tensor, accumulate: bool) -> None:
        """Compute total[:] = (total if accumulate else 0) + summed * scale_of_sum(summed.dtype)."""
        bring(summed, total, accumulate, self.scale_of_sum(summed.dtype), self._device_factors)


def _limit_bytes(target: Tensor, source: Tensor) -> int:
    """Return how many bytes of gradients in the source's dtype may wait to be copied to the target's slot."""
    slot_numel = target.untyped_storage().nbytes() // target.itemsize
    return min(MOST_BATCH_BYTES, max(LEAST_BATCH_BYTES, slot_numel * source.itemsize // _BATCH_SHARE))


def _chunks(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield corresponding 1-D parts of both tensors; `target` must be contiguous."""
    into, terms = target.view(-1), source.reshape(-1)
    for start in range(0, into.numel(), CHUNK_NUMEL):
        yield into[start : start + CHUNK_NUMEL], terms[start : start + CHUNK_NUMEL]

"""Adding gradients into buffers of perhaps another dtype, without allocating.

A CPU operation on two dtypes casts an operand into memory of its own, and one with `out=` of another dtype computes in
the inputs' dtype, so that 1/3 of a bf16 gradient would be rounded to bf16 on its way into an fp32 buffer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_FP32_BYTES = 4
CHUNK_NUMEL = 256 * 1024
"""Elements cast at a time where dtypes differ on a CPU."""


class ScaledAddition:
    """target (+)= scale * source, for tensors that require no gradient: nothing is recorded, so no mode is changed."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._factors: dict[torch.dtype, Tensor] = {}
        self._scratch: dict[torch.dtype, Tensor] = {}

    @property
    def scratch_bytes(self) -> int:
        """What it holds by now."""
        return sum(memory.nbytes for held in (self._factors, self._scratch) for memory in held.values())

    def write(self, target: Tensor, source: Tensor) -> None:
        """target[:] = scale * source, scaled in the wider dtype of the two, and rounded once."""
        if source.dtype == target.dtype and target.is_cpu and self._is_exact(target.dtype):
            torch.mul(source, self._factor(target.dtype), out=target)
            return
        wide = torch.promote_types(target.dtype, source.dtype)
        if target.dtype == wide != source.dtype:
            target.copy_(source)
            target.mul_(self._factor(wide))
        elif target.device.type != "cpu":
            torch.mul(source, self._scale, out=target)
        else:
            wide = torch.promote_types(wide, torch.float32)
            for part, term in _chunks(target, source):
                part.copy_(self._memory(wide, term.numel()).copy_(term).mul_(self._factor(wide)))

    def add(self, target: Tensor, source: Tensor) -> None:
        """target += scale * source, in the wider dtype of the two."""
        if target.dtype == source.dtype or target.device.type != "cpu":
            target.add_(source, alpha=self._scale)
            return
        wide = torch.promote_types(target.dtype, source.dtype)
        for part, term in _chunks(target, source):
            if part.dtype == wide:
                part.add_(self._memory(wide, term.numel()).copy_(term), alpha=self._scale)
            else:
                total = self._memory(wide, part.numel()).copy_(part)
                part.copy_(total.add_(term, alpha=self._scale))

    def _is_exact(self, dtype: torch.dtype) -> bool:
        """Whether torch would multiply by the factor of that dtype: by the number itself it would round less."""
        return dtype.itemsize >= _FP32_BYTES or self._factor(dtype).item() == self._scale

    def _factor(self, dtype: torch.dtype) -> Tensor:
        """The scale as a 0-d tensor on the CPU: given a number, torch makes one for each call."""
        if dtype not in self._factors:
            with torch.inference_mode(False):
                self._factors[dtype] = torch.tensor(self._scale, dtype=dtype, device="cpu")
        return self._factors[dtype]

    def _memory(self, dtype: torch.dtype, numel: int) -> Tensor:
        if dtype not in self._scratch or self._scratch[dtype].numel() < numel:
            with torch.inference_mode(False):
                self._scratch[dtype] = torch.empty(numel, dtype=dtype, device="cpu")
        return self._scratch[dtype][:numel]


def _chunks(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Corresponding 1-D parts of both; the target is contiguous."""
    into, terms = target.view(-1), source.reshape(-1)
    for start in range(0, into.numel(), CHUNK_NUMEL):
        yield into[start : start + CHUNK_NUMEL], terms[start : start + CHUNK_NUMEL]

"""Bandwidth-bound: blocks of Llama 2 7B, as many of 8 as the device has room for, in bf16."""

from collections.abc import Iterator

import torch

from benchmarks.accelerator.bench import Bench, Cases
from benchmarks.accelerator.device import GIB
from benchmarks.accelerator.meshes import serves
from benchmarks.accelerator.models import LlamaShape, LlamaStack
from benchmarks.accelerator.row import Row, figure, impossible
from benchmarks.accelerator.sides import Workload, all_rows

_BLOCKS = 8
_SEQ = 2048
_A_BLOCK_GIB = 4.5
"""Of all three engines together: the plain one's weights, gradients and AdamW state (bf16), two engines' eighths of
fp32, one engine's fp32 while it is built, one engine's activations; rounded up."""
_APART_GIB = 8.0
"""Slots, context and workspaces."""
_LITTLE = LlamaShape(width=64, hidden=128, heads=2)


def llama(bench: Bench) -> Iterator[Row]:
    if not serves(bench.device):
        yield impossible("llama", f"StreamCollectives serve CUDA and ROCm, not {bench.device.type}")
        return
    shape, seq, blocks = (_LITTLE, 16, 2) if bench.is_small else (LlamaShape(), _SEQ, _blocks_in(bench))
    yield figure("blocks", f"{blocks} of {shape.numel / 1e6:.1f} M", f"sequence of {seq}, bf16, fp32 masters")
    x = torch.randn(1, seq, shape.width, device=bench.device, dtype=torch.bfloat16, requires_grad=True)

    def build() -> LlamaStack:
        with torch.device(bench.device):
            return LlamaStack(blocks, shape)

    yield from all_rows(bench, Workload("llama", build, blocks, x, torch.bfloat16, rounds=2 if bench.is_small else 7))


def _blocks_in(bench: Bench) -> int:
    free_bytes, _ = torch.get_device_module(bench.device).mem_get_info(bench.device)
    return max(1, min(_BLOCKS, int((free_bytes / GIB - _APART_GIB) / _A_BLOCK_GIB)))


CASES: Cases = {"llama": llama}

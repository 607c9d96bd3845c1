"""Launch-bound: 32 tiny blocks, each a unit."""

from collections.abc import Iterator

import torch

from benchmarks.accelerator.bench import Bench, Cases
from benchmarks.accelerator.meshes import serves
from benchmarks.accelerator.row import Row, impossible
from benchmarks.accelerator.sides import Workload, all_rows
from benchmarks.steps.tiny import WIDTH, TinyStack

_UNITS = 32


def tiny(bench: Bench) -> Iterator[Row]:
    if not serves(bench.device):
        yield impossible("tiny", f"StreamCollectives serve CUDA and ROCm, not {bench.device.type}")
        return
    units = 4 if bench.quick else _UNITS
    x = torch.randn(2, WIDTH, device=bench.device, requires_grad=True)
    work = Workload("tiny", lambda: TinyStack(units).to(bench.device), units, x, rounds=2 if bench.quick else 21)
    yield from all_rows(bench, work)


CASES: Cases = {"tiny": tiny}

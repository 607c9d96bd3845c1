"""How long a small kernel waits beside a queue of large products, on a stream of usual priority and of a higher one.

Gathers and reductions are such kernels: NCCL's blocks wait for a place as any others do.
"""

from collections.abc import Iterator
from statistics import median

import torch

from benchmarks.accelerator.bench import Bench, Cases
from benchmarks.accelerator.device import synchronize
from benchmarks.accelerator.row import NO_ACCELERATOR, Row, impossible, reached
from benchmarks.accelerator.trace import spread

_SIZE = 8192
_PRODUCTS = 12
_REPEATS = 15
_SHARE = 0.5


def small_kernel(bench: Bench) -> Iterator[Row]:
    name = "small kernel beside products"
    if bench.device.type != "cuda":
        yield impossible(name, NO_ACCELERATOR if bench.on_cpu else "written for CUDA's streams")
        return
    size = _SIZE // 4 if bench.quick else _SIZE
    matrix = torch.randn(size, size, device=bench.device, dtype=torch.bfloat16)
    out, little = torch.empty_like(matrix), torch.zeros(4096, device=bench.device)
    streams = {priority: torch.cuda.Stream(bench.device, priority=priority) for priority in (0, -1)}
    waited: dict[int, list[float]] = {priority: [] for priority in streams}
    for turn in range(_REPEATS + 2):
        for priority, stream in streams.items():
            us = _beside(matrix, out, little, stream)
            if turn > 1:
                waited[priority].append(us)
    synchronize(bench.device)
    usual, high = (median(waited[priority]) for priority in (0, -1))
    yield reached(
        name,
        high <= _SHARE * usual,
        f"priority -1: {spread(waited[-1])} us",
        f"at most {_SHARE:g} of priority 0: {spread(waited[0])} us",
        "what the engine's streams, of priority 0, may wait for longer",
    )


def _beside(matrix: torch.Tensor, out: torch.Tensor, little: torch.Tensor, stream: torch.cuda.Stream) -> float:
    """Microseconds from when the kernel could begin to when it was over, with products before and after it in time."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    for _ in range(_PRODUCTS // 2):
        torch.mm(matrix, matrix, out=out)
    with torch.cuda.stream(stream):
        begin.record(stream)
        little.add_(1.0)
        end.record(stream)
    for _ in range(_PRODUCTS // 2):
        torch.mm(matrix, matrix, out=out)
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end)


CASES: Cases = {"small kernel beside products": small_kernel}

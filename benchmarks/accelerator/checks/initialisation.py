"""Initial numbers of a model on the meta device: drawn on the device, and on the CPU."""

import time
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn

import shardwise as sw
from benchmarks.accelerator.bench import Bench, Cases
from benchmarks.accelerator.device import MIB, synchronize
from benchmarks.accelerator.models import LlamaShape, LlamaStack
from benchmarks.accelerator.row import NO_ACCELERATOR, Row, correct, figure, impossible, reached
from shardwise import device_tools

_BLOCKS = 16
"""Of Llama 2 7B: 3.2 G parameters."""
_LITTLE = LlamaShape(width=64, hidden=176, heads=2)
_SLOWEST = 0.1
"""Of the CPU's time for the same bytes."""


def rates(bench: Bench) -> Iterator[Row]:
    """The CPU draws one block, which is enough to know its rate."""
    shape, blocks = (_LITTLE, 2) if bench.is_small else (LlamaShape(), _BLOCKS)
    _sharded(1, _LITTLE, on_device=True)  # what is set up once
    device_tools.reset_peak(bench.device)
    synchronize(bench.device)
    start_s = time.perf_counter()
    model = _sharded(blocks, shape, on_device=True)
    synchronize(bench.device)
    took_s = time.perf_counter() - start_s
    shard_bytes = 4 * blocks * shape.numel
    peak_bytes = 0 if bench.on_cpu else device_tools.allocated_bytes(bench.device)[1]
    del model
    start_s = time.perf_counter()
    _sharded(1, shape, on_device=False)
    cpu_s = blocks * (time.perf_counter() - start_s)
    value = f"{took_s:.2f} s for {blocks * shape.numel / 1e9:.2f} G parameters"
    told = f"one block on the CPU, times {blocks}: {cpu_s:.1f} s"
    if bench.on_cpu:
        yield figure("initial numbers, on the device", value, f"{told}; {NO_ACCELERATOR}")
        return
    target = f"at most {_SLOWEST:g} of the CPU's: {_SLOWEST * cpu_s:.1f} s"
    yield reached("initial numbers, on the device", took_s <= _SLOWEST * cpu_s, value, target, told)
    largest_bytes = 4 * shape.width * shape.hidden
    extra_bytes = peak_bytes - shard_bytes
    yield reached(
        "memory beside the shards",
        extra_bytes <= 2 * largest_bytes,
        f"{extra_bytes / MIB:.0f} MiB",
        f"at most twice the largest tensor: {2 * largest_bytes / MIB:.0f} MiB",
    )


def right(bench: Bench) -> Iterator[Row]:
    """A seed decides them, the device's generator is left alone, and each weight has its own bounds."""
    first, again, other = (_numbers(seed) for seed in (1, 1, 2))
    same = all(torch.equal(first[name], again[name]) for name in first)
    apart = all(not torch.equal(first[name], other[name]) for name in first if first[name].ndim > 1)
    yield correct("numbers follow the seed", same and apart, f"same {same}, apart {apart}", "equal bits; other bits")
    if bench.on_cpu:
        yield impossible("the device's generator", NO_ACCELERATOR)
    else:
        before = device_tools.random_state(bench.device)
        _sharded(2, _LITTLE, on_device=True)
        left = torch.equal(before, device_tools.random_state(bench.device))
        yield correct("the device's generator", left, "left alone" if left else "moved", "left alone")
    wrong = [name for name, tensor in first.items() if not _fits(tensor)]
    yield correct("distributions", not wrong, f"{len(first) - len(wrong)} of {len(first)} tensors", "all", str(wrong))


def _fits(tensor: Tensor) -> bool:
    """Whether a weight of nn.Linear is uniform within its bound, or a norm's is one."""
    if tensor.ndim == 1:
        return bool((tensor == 1).all())
    bound = tensor.shape[1] ** -0.5
    inside = float(tensor.abs().max()) <= bound * 1.000001
    spread = abs(float(tensor.std()) / (bound / 3**0.5) - 1) < 0.05
    return inside and spread and abs(float(tensor.mean())) < 0.05 * bound


def _numbers(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return sw.full_state_dict(_sharded(2, _LITTLE, on_device=True))


def _sharded(blocks: int, shape: LlamaShape, on_device: bool) -> nn.Module:
    with torch.device("meta"):
        model = LlamaStack(blocks, shape)
    with sw.init_on_device() if on_device else nullcontext():
        return sw.shard(model)


CASES: Cases = {"rates": rates, "right": right}

"""An asynchronous save: how long training stands still, how much memory is pinned, and whether what it saved goes on
bit by bit."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from benchmarks.accelerator import twins
from benchmarks.accelerator.bench import Bench, Cases
from benchmarks.accelerator.device import MIB, same_bits, synchronize
from benchmarks.accelerator.models import SMALL, TINY, seeded
from benchmarks.accelerator.row import NO_ACCELERATOR, Row, correct, figure, impossible, reached
from benchmarks.accelerator.twins import Steps
from benchmarks.common.gpt import GPT, GPTShape

_SHAPE = GPTShape(layers=8, width=1024, heads=16, vocab=16384, seq=256)
_COPIES = 3
"""Weights and AdamW's two moments, fp32."""
_BLOCKED = 2.0
"""Times what one copy of the same bytes to pinned memory takes."""
_PINNED = 1.1
_PROBE_BYTES = 256 * MIB


def blocked(bench: Bench) -> Iterator[Row]:
    model = sw.shard(GPT(TINY if bench.is_small else _SHAPE))
    optimizer = twins.adamw(model.parameters(), fused=True)
    batches = twins.batches_on(bench.device, TINY if bench.is_small else _SHAPE)
    twins.train_sharded(model, optimizer, batches, Steps(steps=1))
    nbytes = _COPIES * sum(p.nbytes for p in model.parameters())
    pinned_before = _pinned_bytes(bench)
    times = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(2):
            synchronize(bench.device)
            start = time.perf_counter()
            sw.checkpoint.save(Path(folder) / f"step-{turn}", model, optimizer, step=turn, asynchronous=True)
            times.append(time.perf_counter() - start)
            sw.checkpoint.wait(model)
    first, again = 1e3 * times[0], 1e3 * times[1]
    value = f"{again:.0f} ms of {nbytes / MIB:.0f} MiB"
    if bench.on_cpu:
        yield figure("asynchronous save, blocked", value, f"the first one {first:.0f} ms; {NO_ACCELERATOR}")
        yield impossible("pinned memory", NO_ACCELERATOR)
        return
    copy_ms = 1e3 * nbytes / copy_bytes_per_s(bench)
    target = f"at most {_BLOCKED:g} copies to pinned memory: {_BLOCKED * copy_ms:.0f} ms"
    told = f"the first one, which allocates, {first:.0f} ms"
    yield reached("asynchronous save, blocked", again <= _BLOCKED * copy_ms, value, target, told)
    after = _pinned_bytes(bench)
    if pinned_before is None or after is None:
        yield impossible("pinned memory", "this torch does not count it")
        return
    taken = after - pinned_before
    yield reached(
        "pinned memory",
        taken <= _PINNED * nbytes,
        f"{taken / MIB:.0f} MiB for {nbytes / MIB:.0f}",
        f"at most {_PINNED:g} times",
    )


def copy_bytes_per_s(bench: Bench) -> float:
    """From the device to pinned memory, alone."""
    source = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=bench.device)
    place = torch.empty(_PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    best = float("inf")
    for _ in range(3):
        synchronize(bench.device)
        start = time.perf_counter()
        place.copy_(source, non_blocking=True)
        synchronize(bench.device)
        best = min(best, time.perf_counter() - start)
    return _PROBE_BYTES / best


def _pinned_bytes(bench: Bench) -> int | None:
    """What the allocator of pinned memory has taken."""
    if bench.device.type != "cuda" or not hasattr(torch.cuda, "host_memory_stats"):
        return None
    told = torch.cuda.host_memory_stats()
    keys = ("reserved_bytes.current", "allocated_bytes.current", "active_bytes.current")  # versions name them apart
    return max((told[key] for key in keys if key in told), default=None)


def resumed(bench: Bench) -> Iterator[Row]:
    """With dropout, so that the device's random state matters."""
    same_bits()
    batches = twins.batches_on(bench.device, TINY if bench.is_small else SMALL)
    late: twins.Batches = lambda index: batches(1000 + index)  # noqa: E731
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step-3"
        model, optimizer = _built(bench)
        twins.train_sharded(model, optimizer, batches, Steps())
        sw.checkpoint.save(path, model, optimizer, step=3, asynchronous=True)
        expected = twins.train_sharded(model, optimizer, late, Steps())
        sw.checkpoint.wait(model)
        model, optimizer = _built(bench)
        sw.checkpoint.load(path, model, optimizer)
        found = twins.train_sharded(model, optimizer, late, Steps())
    same = twins.same(expected, found)
    value = "equal bits" if same else f"off by {twins.apart(expected, found):.2g}"
    yield correct("resumed from an asynchronous save", same, value, "equal bits")


def _built(bench: Bench) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(lambda: GPT(TINY if bench.is_small else SMALL), bench.device)
    model.token_embedding.register_forward_hook(_dropout)
    sw.shard(model, precision=sw.Precision(param="bf16", reduce="fp32"))
    return model, twins.adamw(model.parameters(), fused=True)


def _dropout(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return F.dropout(output, 0.1)


CASES: Cases = {"blocked": blocked, "resumed": resumed}

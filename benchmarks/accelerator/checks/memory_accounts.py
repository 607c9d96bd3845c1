"""Three accounts of one training's memory: the allocator's, `sw.memory`'s and the forecast's. At world 1, where nothing
is missing from a step, its time beside the forecast's too."""

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from benchmarks.accelerator import twins
from benchmarks.accelerator.bench import Bench, Cases
from benchmarks.accelerator.device import MIB, synchronize
from benchmarks.accelerator.meshes import FAKE_WORLD
from benchmarks.accelerator.models import FedGPT
from benchmarks.accelerator.row import NO_ACCELERATOR, Row, figure, impossible, reached
from benchmarks.common.gpt import GPTShape

_SHAPE = GPTShape(layers=12, width=1024, heads=16, vocab=16384, seq=1024)
_LITTLE = GPTShape(layers=2, width=32, heads=2, vocab=64, seq=16)
_BATCH = 4
_KNOWN = 0.02
_FORECAST = 0.05
_APART_BYTES = 64 * MIB
"""Libraries' workspaces, which the allocator hands out as well."""
_STEPS = 3
_TIMED_STEPS = 10
_FORECAST_TIME = 0.15
"""Of a small model on one device, about the spread of published runs around their forecasts."""


@dataclass(frozen=True)
class Measured:
    """Bytes of the allocator, over what it had handed out before."""

    after: int
    """Between steps: state and slots, no activations."""
    peak: int
    reserved: int
    known: int
    """What `sw.memory` says is there, its activations left out."""
    activations: int
    """What `sw.memory` says activations took at the peak."""
    step_time_s: float


def alone(bench: Bench) -> Iterator[Row]:
    yield from _accounts(bench, 1, "world 1")


def one_of_eight(bench: Bench) -> Iterator[Row]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=FAKE_WORLD)
    try:
        yield from _accounts(bench, FAKE_WORLD, f"one of {FAKE_WORLD}")
    finally:
        dist.destroy_process_group()


def _accounts(bench: Bench, world_size: int, name: str) -> Iterator[Row]:
    shape = _LITTLE if bench.is_small else _SHAPE
    precision = sw.Precision(param="bf16", reduce="fp32")
    forecast = sw.plan.forecast(
        lambda: FedGPT(shape),
        gpu=_data_of(bench),
        gpus_per_node=world_size,
        nodes=1,
        precision=precision,
        seq_len=shape.seq,
        micro_batch=_BATCH,
    )
    told = f"{forecast.peak_memory_bytes / MIB:.0f} MiB at {forecast.peak_at[0]} {forecast.peak_at[1]}"
    if bench.on_cpu:
        _train(bench, shape, precision)
        for what in ("sw.memory", "forecast of the peak", "forecast of what is reserved"):
            yield impossible(f"{name}: {what}", f"{NO_ACCELERATOR}; forecast for an H100: {told}")
        if world_size == 1:
            yield impossible(f"{name}: forecast of a step's time", NO_ACCELERATOR)
        return
    measured = _measure(bench, shape, precision)
    yield _close(f"{name}: sw.memory", measured.known, measured.after, _KNOWN, "state and slots, between steps")
    peak = forecast.peak_memory_bytes
    yield _close(f"{name}: forecast of the peak", peak, measured.peak, _FORECAST, forecast.peak_at[1])
    reserved = forecast.reserved_memory_bytes
    yield _close(f"{name}: forecast of what is reserved", reserved, measured.reserved, 2 * _FORECAST, "")
    yield figure(f"{name}: activations at the peak", f"{measured.activations / MIB:.0f} MiB", "as sw.memory has them")
    if world_size == 1:
        yield _time_row(f"{name}: forecast of a step's time", forecast.step_time_s, measured.step_time_s)


def _time_row(name: str, told_s: float, measured_s: float) -> Row:
    value = f"{1e3 * told_s:.4g} of {1e3 * measured_s:.4g} ms"
    return reached(name, abs(told_s / measured_s - 1) <= _FORECAST_TIME, value, f"within {_FORECAST_TIME:.0%}", "")


def _close(name: str, told: int, measured: int, share: float, reason: str) -> Row:
    slack = share * measured + _APART_BYTES
    value = f"{told / MIB:.0f} of {measured / MIB:.0f} MiB"
    return reached(
        name, abs(told - measured) <= slack, value, f"within {share:.0%} and {_APART_BYTES // MIB} MiB", reason
    )


def _measure(bench: Bench, shape: GPTShape, precision: sw.Precision) -> Measured:
    handle = torch.get_device_module(bench.device)
    gc.collect()
    handle.empty_cache()
    before = handle.memory_allocated(bench.device)
    handle.reset_peak_memory_stats(bench.device)
    model, optimizer, times_s = _train(bench, shape, precision, _STEPS + _TIMED_STEPS)
    held = sw.memory(model)
    known = sum(nbytes for kind, nbytes in held.now.items() if kind != "activations")
    measured = Measured(
        after=handle.memory_allocated(bench.device) - before,
        peak=handle.max_memory_allocated(bench.device) - before,
        reserved=handle.max_memory_reserved(bench.device),
        known=known,
        activations=held.peak.get("activations", 0),
        step_time_s=median(times_s[_STEPS:]),
    )
    del model, optimizer
    return measured


def _train(
    bench: Bench, shape: GPTShape, precision: sw.Precision, steps: int = _STEPS
) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    """Returns the time of each step as well, in seconds."""
    model = sw.shard(FedGPT(shape), precision=precision)
    optimizer = twins.adamw(model.parameters(), fused=True)
    batches = twins.batches_on(bench.device, shape, _BATCH)
    times_s = []
    for step in range(steps):
        start = time.perf_counter()
        model(*batches(step)).backward()
        sw.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(bench.device)
        times_s.append(time.perf_counter() - start)
    return model, optimizer, times_s


def _data_of(bench: Bench) -> str:
    """The hardware data's name for the device."""
    name = "" if bench.on_cpu else torch.get_device_module(bench.device).get_device_name(bench.device).lower()
    return "h200-sxm" if "h200" in name else "h100-sxm-80gb"


CASES: Cases = {"world 1": alone, "one of 8": one_of_eight}

"""Shards, gradients and optimizer state in the host's memory and on disk: the same bits, how much of the link is used,
waits for the device, what gradients take of its memory, the optimizer's step on the host, and a model that is larger
than the device's memory."""

import gc
import math
import tempfile
import time
from collections.abc import Iterator
from statistics import median

import torch
from torch import nn

import shardwise as sw
from benchmarks.accelerator import twins
from benchmarks.accelerator.bench import Bench, Cases
from benchmarks.accelerator.checks.saves import copy_bytes_per_s
from benchmarks.accelerator.device import MIB, same_bits, synchronize
from benchmarks.accelerator.models import SMALL, TINY, seeded
from benchmarks.accelerator.row import NO_ACCELERATOR, Row, correct, figure, impossible, reached
from benchmarks.accelerator.twins import Course, Steps
from benchmarks.accelerator.waits import waits
from benchmarks.common.gpt import GPT, GPTShape

_SHAPE = GPTShape(layers=12, width=1024, heads=16, vocab=16384, seq=1024)
_LARGE = GPTShape(layers=24, width=1536, heads=16, vocab=4096, seq=256)
_CAP_BYTES = 4 * 2**30
"""Of the allocator, for a model whose weights, gradients and AdamW state in fp32 are nearly three times as much."""
_PLACES = {
    "params": {"params": "cpu"},
    "optimizer": {"optimizer": "cpu"},
    "params and optimizer": {"params": "cpu", "optimizer": "cpu"},
    "gradients": {"gradients": "cpu"},
    "params, optimizer and gradients": {"params": "cpu", "optimizer": "cpu", "gradients": "cpu"},
}
_ON_DISK = {
    "params": {"params": "nvme"},
    "optimizer": {"optimizer": "nvme"},
    "params and optimizer": {"params": "nvme", "optimizer": "nvme"},
}
_STEPS_ON_HOST = {
    "optimizer": {"optimizer": "cpu", "step": "cpu"},
    "params, optimizer and gradients": {"params": "cpu", "optimizer": "cpu", "gradients": "cpu", "step": "cpu"},
}
_OFF = 2e-2
"""How far weights may be apart after steps on two processors, whose sums differ in their last bits."""
_BYTES_STEPPED = 7 * 4
"""That AdamW reads and writes for each parameter in fp32: weights and moments both ways, and gradients."""
_LINK = 0.5
"""Of what the link moves one way, while a step computes nothing else."""
_TIMED_STEPS = 5
_APART_BYTES = MIB
"""Between the allocator's account of gradients and `sw.memory`'s: blocks are rounded."""


def bits(bench: Bench) -> Iterator[Row]:
    """Accumulation, clipping and prefetched steps, with released memory full of NaN."""
    same_bits()
    usual, again = _course(bench, None), _course(bench, None)
    for name, places in _PLACES.items():
        ours = _course(bench, sw.Offload(**places))
        if bench.on_cpu:  # where the host's memory is the device's
            yield impossible(f"{name} on the host", NO_ACCELERATOR)
            continue
        yield _alike(f"{name} on the host", usual, again, ours)
    with tempfile.TemporaryDirectory() as path:
        for name, places in _ON_DISK.items():
            yield _alike(f"{name} on disk", usual, again, _course(bench, sw.Offload(path=path, **places)))


def _alike(name: str, usual: Course, again: Course, ours: Course) -> Row:
    """Ours beside two courses without offload."""
    off, repeats = twins.apart(usual, ours), twins.same(usual, again)
    why = "" if repeats else "without offload the same training does not repeat its own bits"
    ok = twins.same(usual, ours) if repeats else off <= _OFF
    return correct(name, ok, f"off by {off:.2g}", "equal bits" if repeats else f"at most {_OFF:g}", why)


def _course(bench: Bench, offload: sw.Offload | None) -> Course:
    shape = TINY if bench.is_small else SMALL
    model = sw.shard(
        seeded(lambda: GPT(shape), bench.device), precision=sw.Precision(param="bf16", reduce="fp32"), offload=offload
    )
    optimizer = twins.adamw(model.parameters(), fused=True)
    batches = twins.batches_on(bench.device, shape)
    return twins.train_sharded(model, optimizer, batches, Steps(micro=2, clip=0.5))


def link(bench: Bench) -> Iterator[Row]:
    """Step times with and without, and the share of the link's speed that the optimizer's step reaches alone."""
    shape = TINY if bench.is_small else _SHAPE
    times = {}
    for name, places in {"none": None, **_PLACES}.items():
        model, optimizer = _made(shape, None if places is None else sw.Offload(**places))
        times[name] = _times(bench, model, optimizer, shape)
        numel = sum(p.numel() for p in model.parameters())
        del model, optimizer
    yield from disk(bench, times["none"][0])
    for name in _PLACES:
        step, alone = times[name]
        yield figure(
            f"a step with {name} on the host",
            f"{1e3 * step:.0f} ms; {1e3 * times['none'][0]:.0f} without",
            f"optimizer.step() alone {1e3 * alone:.0f} ms",
        )
    if bench.on_cpu:
        yield impossible("share of the link", NO_ACCELERATOR)
        return
    moved = 2 * 4 * numel  # AdamW's moments, each way
    share = moved / times["optimizer"][1] / copy_bytes_per_s(bench)
    yield reached("share of the link", share >= _LINK, f"{share:.2f}", f"at least {_LINK:g} of one way, alone")


def disk(bench: Bench, usual_s: float) -> Iterator[Row]:
    """The same from and to a disk of this machine, and what of a step waits for the device where it should not."""
    shape = TINY if bench.is_small else _SHAPE
    with tempfile.TemporaryDirectory() as path:
        model, optimizer = _made(shape, sw.Offload(params="nvme", optimizer="nvme", path=path))
        step, alone = _times(bench, model, optimizer, shape)
        batches = twins.batches_on(bench.device, shape)
        with waits(bench.device) as found:
            model(*batches(0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        synchronize(bench.device)
        nbytes = 2 * 12 * sum(p.numel() for p in model.parameters())  # weights and moments, each way
        del model, optimizer
    yield figure(
        "a step with params and optimizer on disk",
        f"{1e3 * step:.0f} ms; {1e3 * usual_s:.0f} without",
        f"optimizer.step() alone {1e3 * alone:.0f} ms, {nbytes / alone / 1e9:.2f} GB/s",
    )
    told = f"{len(found)}: {', '.join(sorted(set(found)))}" if found else "none"
    yield correct("waits for the device with a disk", not found, told, "none")


def on_host(bench: Bench) -> Iterator[Row]:
    """The optimizer's step on the host beside one on the device: weights, seconds, and memory of the device."""
    if bench.on_cpu:
        yield impossible("a step on the host", NO_ACCELERATOR)
        return
    usual = _course(bench, None)
    for name, places in _STEPS_ON_HOST.items():
        off = twins.apart(usual, _course(bench, sw.Offload(**places)))
        yield correct(f"{name} stepped on the host", off <= _OFF, f"off by {off:.2g}", f"at most {_OFF:g}")
    shape = TINY if bench.is_small else _SHAPE
    for name, places in _STEPS_ON_HOST.items():
        times, peaks = [], []
        for asked in ({key: place for key, place in places.items() if key != "step"}, places):
            gc.collect()
            torch.accelerator.reset_peak_memory_stats(bench.device)
            model, optimizer = _made(shape, sw.Offload(**asked))
            times.append(_times(bench, model, optimizer, shape))
            peaks.append(torch.accelerator.max_memory_allocated(bench.device))
            nbytes = _BYTES_STEPPED * sum(p.numel() for p in model.parameters())
            del model, optimizer
        yield figure(
            f"a step with {name} on the host, taken there",
            f"{1e3 * times[1][0]:.0f} ms; {1e3 * times[0][0]:.0f} on the device",
            f"optimizer.step() alone {1e3 * times[1][1]:.0f} ms ({nbytes / times[1][1] / 1e9:.0f} GB/s of memory), "
            f"on the device {1e3 * times[0][1]:.0f}; peak {peaks[1] / MIB:.0f} MiB, {peaks[0] / MIB:.0f}",
        )


def gradients(bench: Bench) -> Iterator[Row]:
    """What the device has of them after a backward, the allocator says, with them there and on the host; what of an
    accumulated and clipped step waits for the device; and how long clipping takes."""
    shape = TINY if bench.is_small else _SHAPE
    there, told = _gradient_bytes(bench, shape, None)
    left, ring = _gradient_bytes(bench, shape, sw.Offload(gradients="cpu"))
    model, optimizer = _made(shape, sw.Offload(gradients="cpu"))
    batches = twins.batches_on(bench.device, shape)
    with waits(bench.device) as found:
        for index in range(2):
            model(*batches(index)).backward()
        sw.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    synchronize(bench.device)
    shown = f"{len(found)}: {', '.join(sorted(set(found)))}" if found else "none"
    yield correct("waits for the device with gradients on the host", not found, shown, "none")
    model(*batches(2)).backward()
    norm_s, clip_s = (median(_clipping_s(bench, model, most) for _ in range(_TIMED_STEPS)) for most in (math.inf, 1.0))
    yield figure("clipping with gradients on the host", f"{1e3 * clip_s:.1f} ms; the norm alone {1e3 * norm_s:.1f}")
    if bench.on_cpu:
        yield impossible("gradients on the device", NO_ACCELERATOR)
        return
    yield correct(
        "gradients on the device",
        abs((there - left) - (told - ring)) <= _APART_BYTES and ring < told,
        f"{(there - left) / MIB:.1f} MiB fewer, by sw.memory {(told - ring) / MIB:.1f}",
        f"within {_APART_BYTES / MIB:g} MiB",
        f"of {told / MIB:.0f} MiB a few slices of {ring / MIB:.0f} are left",
    )


def _gradient_bytes(bench: Bench, shape: GPTShape, offload: sw.Offload | None) -> tuple[int, int]:
    """After a second backward: what the allocator has handed out for this model, and what `sw.memory` says of
    gradients."""
    gc.collect()
    before = 0 if bench.on_cpu else torch.accelerator.memory_allocated(bench.device)
    model, optimizer = _made(shape, offload)
    batches = twins.batches_on(bench.device, shape)
    for index in range(2):
        model(*batches(index)).backward()
        if not index:
            optimizer.step()
            optimizer.zero_grad()
    synchronize(bench.device)
    allocated = 0 if bench.on_cpu else torch.accelerator.memory_allocated(bench.device)
    return allocated - before, sw.memory(model).now["grad_shards"]


def _clipping_s(bench: Bench, model: nn.Module, max_norm: float) -> float:
    synchronize(bench.device)
    start = time.perf_counter()
    sw.clip_grad_norm_(model, max_norm)
    synchronize(bench.device)
    return time.perf_counter() - start


def _made(shape: GPTShape, offload: sw.Offload | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sw.shard(GPT(shape), precision=sw.Precision(param="bf16", reduce="fp32"), offload=offload)
    return model, twins.adamw(model.parameters(), fused=True)


def _times(bench: Bench, model: nn.Module, optimizer: torch.optim.Optimizer, shape: GPTShape) -> tuple[float, float]:
    """Seconds of a step, and of its `optimizer.step()` where nothing else is under way; medians."""
    batches = twins.batches_on(bench.device, shape)
    steps, alone = [], []
    for index in range(_TIMED_STEPS + 2):
        synchronize(bench.device)
        start = time.perf_counter()
        model(*batches(index)).backward()
        optimizer.step()
        synchronize(bench.device)
        steps.append(time.perf_counter() - start)
        start = time.perf_counter()
        optimizer.step()
        synchronize(bench.device)
        alone.append(time.perf_counter() - start)
        optimizer.zero_grad()
    return median(steps[2:]), median(alone[2:])


def beyond(bench: Bench) -> Iterator[Row]:
    """Weights, gradients and state are nearly three times what the allocator may hand out."""
    shape = TINY if bench.is_small else _LARGE
    with torch.device("meta"):
        model = GPT(shape)
    state_bytes = 16 * sum(p.numel() for p in model.parameters())
    if not bench.on_cpu:
        module = torch.get_device_module(bench.device)
        module.set_per_process_memory_fraction(_CAP_BYTES / module.get_device_properties(bench.device).total_memory)
    sw.shard(model, precision=sw.Precision(param="bf16"), offload=sw.Offload(params="cpu", optimizer="cpu"))
    optimizer = twins.adamw(model.parameters(), fused=True)
    sw.optimizer_in_backward(model, optimizer)
    batches = twins.batches_on(bench.device, shape)
    losses = []
    for _ in range(3):
        loss = model(*batches(0))
        loss.backward()
        losses.append(float(loss.detach()))
    synchronize(bench.device)
    told = " ".join(f"{loss:.3f}" for loss in losses)
    if bench.on_cpu:
        yield impossible("a model larger than the memory", NO_ACCELERATOR)
        return
    peak = torch.accelerator.max_memory_allocated(bench.device)
    yield correct(
        "a model larger than the memory",
        losses[2] < losses[0] and peak <= _CAP_BYTES,
        f"{peak / MIB:.0f} MiB at the peak; losses {told}",
        f"falling, in {_CAP_BYTES / MIB:.0f} MiB",
        f"{state_bytes / MIB:.0f} MiB of weights, gradients and state",
    )


CASES: Cases = {"bits": bits, "link": link, "gradients": gradients, "on host": on_host, "beyond": beyond}

"""Three engines side by side in one fake world: the plain model, FSDP2 and shardwise over StreamCollectives.

They take turns. What they share is the machine and the process; bytes are not moved for any of them.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import shardwise as sw
from benchmarks.accelerator.bench import Bench
from benchmarks.accelerator.device import synchronize
from benchmarks.accelerator.meshes import FAKE_WORLD, fake_world
from benchmarks.accelerator.row import NO_ACCELERATOR, Row, Verdict, figure, impossible, reached
from benchmarks.accelerator.trace import Trace, profiled, spread
from benchmarks.accelerator.waits import waits
from shardwise.engine.lookup import require_engine
from shardwise.fsdp.mesh import Mesh

FSDP2_SHARE = 0.35
"""Of FSDP2's host time a unit: the target that `overhead.py` has on CPUs."""
_NEXT_AT_ONCE_US = 50.0
"""A device that has its next kernel within this was not kept waiting: it is some ten launches' time."""
_SHOWN = 3


@dataclass(frozen=True)
class Workload:
    """What every engine trains."""

    name: str
    build: Callable[[], nn.Module]
    """On the device, fp32."""
    units: int
    inputs: Tensor
    compute: torch.dtype | None = None
    rounds: int = 7


@dataclass
class Side:
    """One engine's model, and its times in seconds by what was timed."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[[], object]
    times_s: dict[str, list[float]] = field(default_factory=dict)

    def forward_backward(self, x: Tensor) -> None:
        with torch.profiler.record_function("forward"):
            loss = self.model(x).float().square().mean()
        with torch.profiler.record_function("backward"):
            loss.backward()
        x.grad = None

    def update(self) -> None:
        with torch.profiler.record_function("clip"):
            self.clip()
        with torch.profiler.record_function("adamw"):
            self.optimizer.step()
        with torch.profiler.record_function("zero"):
            self.optimizer.zero_grad()

    def step(self, x: Tensor) -> None:
        self.forward_backward(x)
        self.update()


@contextlib.contextmanager
def sides(bench: Bench, work: Workload) -> Iterator[dict[str, Side]]:
    with fake_world(bench.device) as mesh:
        yield {side.name: side for side in (_plain(work), _fsdp2(bench, work), _shardwise(bench, work, mesh))}


def _side(name: str, model: nn.Module, clip: Callable[[], object] | None = None) -> Side:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    return Side(name, model, optimizer, clip or (lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)))


def _plain(work: Workload) -> Side:
    model = work.build()
    return _side("plain", model if work.compute is None else model.to(work.compute))


def _fsdp2(bench: Bench, work: Workload) -> Side:
    mesh = init_device_mesh(bench.device.type, (FAKE_WORLD,))
    policy = MixedPrecisionPolicy(param_dtype=work.compute, reduce_dtype=torch.float32 if work.compute else None)
    model: Any = work.build()
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return _side("fsdp2", model)


def _shardwise(bench: Bench, work: Workload, mesh: Mesh) -> Side:
    compute = str(work.compute).removeprefix("torch.") if work.compute else None
    precision = sw.Precision(param=compute, reduce="float32") if compute else None
    model = sw.shard(work.build(), "full_shard", mesh=mesh, precision=precision)
    sw.memory(model)  # makes the slots
    engine = require_engine(model)
    for slot in [*engine.unsharder.all_slots, *engine.reducer.slots.all]:
        slot.buffer.bytes.zero_()  # what no peer will ever send must not be NaN
    synchronize(bench.device)
    return _side("shardwise", model, lambda: sw.clip_grad_norm_(model, 1.0))


# Time -----------------------------------------------------------------------------------------------------------------


def timed(bench: Bench, work: Workload, found: dict[str, Side]) -> None:
    """Take turns. "host": until forward and backward have returned; "step": until the device is through with a step."""
    for turn in range(work.rounds + 2):
        for side in found.values():
            synchronize(bench.device)
            start = time.perf_counter()
            side.forward_backward(work.inputs)
            host = time.perf_counter()
            side.update()
            synchronize(bench.device)
            end = time.perf_counter()
            if turn > 1:  # the first ones compile, plan and learn the order
                side.times_s.setdefault("host", []).append(host - start)
                side.times_s.setdefault("step", []).append(end - start)


def time_rows(bench: Bench, work: Workload, found: dict[str, Side]) -> Iterator[Row]:
    host = {name: side.times_s["host"] for name, side in found.items()}
    over = {
        name: [(mine - plain) / work.units * 1e6 for mine, plain in zip(host[name], host["plain"], strict=True)]
        for name in ("fsdp2", "shardwise")
    }
    ours, theirs = (median(over[name]) for name in ("shardwise", "fsdp2"))
    judged = _unjudged if bench.is_small else reached
    yield judged(
        "host time a unit over plain",
        ours <= FSDP2_SHARE * max(theirs, 0.0),
        f"{spread(over['shardwise'])} us",
        f"{FSDP2_SHARE} of FSDP2's {spread(over['fsdp2'])} us",
        f"forward and backward of plain: {spread([1e3 * t for t in host['plain']])} ms",
    )
    steps = {name: side.times_s["step"] for name, side in found.items()}
    ratios = [mine / other for mine, other in zip(steps["shardwise"], steps["fsdp2"], strict=True)]
    told = ", ".join(f"{name} {1e3 * median(times):.4g} ms" for name, times in steps.items())
    yield judged("step over FSDP2's", median(ratios) <= 1.0, spread(ratios), "at most 1", told)


def _unjudged(name: str, ok: bool, value: str, target: str, reason: str) -> Row:
    return Row(name, Verdict.FIGURE, value, target, f"too small to judge; {reason}")


# Waits and launches ---------------------------------------------------------------------------------------------------


def wait_rows(bench: Bench, work: Workload, found: dict[str, Side]) -> Iterator[Row]:
    """Between the beginning of a forward and the end of the optimizer's step."""
    name = "waits for the device in a step"
    if bench.device.type != "cuda":
        yield impossible(name, NO_ACCELERATOR if bench.on_cpu else "only CUDA counts them")
        return
    seen = {}
    for side in found.values():
        with waits(bench.device) as seen[side.name]:
            side.step(work.inputs)
        synchronize(bench.device)
    ours = seen["shardwise"]
    places = [f"{ours.count(place)} x {place}" for place in dict.fromkeys(ours)]
    told = f"FSDP2 {len(seen['fsdp2'])}, plain {len(seen['plain'])}; {'; '.join(places[:_SHOWN])}"
    yield reached(name, not ours, str(len(ours)), "0", told)


def launch_rows(bench: Bench, work: Workload, found: dict[str, Side]) -> Iterator[Row]:
    names = ["launches a unit", "launches of clip and AdamW", "idle after backward and clip"]
    traces = {side.name: _trace(bench, work, side) for side in found.values()}
    if not any(trace.on_device for trace in traces.values()):
        yield from (impossible(name, NO_ACCELERATOR) for name in names)
        return
    a_unit = {n: len(trace.launched("forward", "backward")) / work.units for n, trace in traces.items()}
    yield reached(
        names[0],
        a_unit["shardwise"] <= a_unit["fsdp2"],
        f"{a_unit['shardwise']:.1f}",
        f"FSDP2's {a_unit['fsdp2']:.1f}",
        f"forward and backward, collectives' own work apart; plain {a_unit['plain']:.1f}",
    )
    update = {n: [len(trace.launched(region)) for region in ("clip", "adamw")] for n, trace in traces.items()}
    ours, theirs = update["shardwise"], update["fsdp2"]
    told = f"plain {update['plain'][0]} + {update['plain'][1]}"
    yield reached(
        names[1], sum(ours) <= sum(theirs), f"{ours[0]} + {ours[1]}", f"FSDP2's {theirs[0]} + {theirs[1]}", told
    )
    idle = {n: [trace.idle_after(region) or 0.0 for region in ("backward", "clip")] for n, trace in traces.items()}
    shown = ", ".join(f"{n} {after[0]:.0f} and {after[1]:.0f} us" for n, after in idle.items())
    bound, found_us = _NEXT_AT_ONCE_US + sum(idle["plain"]), sum(idle["shardwise"])
    yield reached(
        names[2], found_us <= bound, f"{found_us:.0f} us", f"plain's + {_NEXT_AT_ONCE_US:.0f} us: {bound:.0f}", shown
    )


def stream_rows(bench: Bench, work: Workload, found: dict[str, Side]) -> Iterator[Row]:
    trace = _trace(bench, work, found["shardwise"])
    if not trace.on_device:
        yield impossible("kernels by stream", NO_ACCELERATOR)
        return
    told = ", ".join(f"stream {stream}: {count}" for stream, count in trace.streams().most_common())
    yield figure("kernels by stream", told, "compute; gathers; reductions")


def _trace(bench: Bench, work: Workload, side: Side) -> Trace:
    path = bench.folder / f"trace-{work.name}-{side.name}.json.gz"
    trace = profiled(bench.device, lambda: side.step(work.inputs), path)
    if side.name != "shardwise":
        path.unlink()
    return trace


def all_rows(bench: Bench, work: Workload) -> Iterator[Row]:
    """Everything that is measured of a workload."""
    with sides(bench, work) as found:
        timed(bench, work, found)
        yield from time_rows(bench, work, found)
        yield from wait_rows(bench, work, found)
        yield from launch_rows(bench, work, found)
        yield from stream_rows(bench, work, found)

"""Recordings of rows, kept on disk by what they depend on: the row's inputs and the code that records."""

import hashlib
import inspect
import os
import pickle
import zlib
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import shardwise
from benchmarks.plans.published import encoder, llama, mpt, tensor_parallel
from benchmarks.plans.published.other_engines import autocast
from benchmarks.plans.published.other_engines.float8 import GATHERS, gathered_in_float8
from benchmarks.plans.published.other_engines.job import PublishedJob
from benchmarks.plans.published.rows import Row
from shardwise.plan.dry_run.recording import Allocate, Facts, Free, Gradient, Recording, StepEvent, StepPhase, Wait
from shardwise.plan.dry_run.step import record
from shardwise.plan.models import adapted
from shardwise.plan.simulate.forecast import forecast_of

_PACKAGES = ("comm", "engine", "layout", "model_tools", "modules", "optim", "plan/dry_run", "policy", "sharded")
"""Folders whose code makes recordings; the others use them."""
_UNTIMED = (Allocate, Free, Gradient)
"""Events that time does not depend on."""
_NOT_RECORDED = (
    "gpu",
    "interconnect",
    "engine",
    "segments",
    "float8",
    "context_bytes",
    "nccl_bytes",
    "separate_reductions",
)
"""Of a job: what a recording does not depend on."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    peak: int
    """Live at once: "allocated"."""
    reserved: int
    outside: int
    """The allocator: context and communicators."""
    usable: int
    """On the device."""

    @property
    def used_share(self) -> float:
        """Of what the device has."""
        return (self.reserved + self.outside) / self.usable


@dataclass(frozen=True)
class Steps:
    """What a step of a row does and needs."""

    facts: Facts
    memory: Memory
    one: tuple[StepEvent, ...]
    """With one micro-batch."""
    two: tuple[StepEvent, ...] | None
    """With two, where the row has more than one. Every further one repeats the second's part."""


def steps_of(row: Row, folder: Path) -> Steps:
    """From a recording in the cache, or made now and put there."""
    recording = _recorded(row, min(2, row.job.accumulation), folder)
    forecast = forecast_of(gathered_in_float8(recording) if row.job.float8 == GATHERS else recording)
    outside = forecast.context_bytes + forecast.nccl_bytes
    memory = Memory(forecast.peak_memory_bytes, forecast.reserved_memory_bytes, outside, forecast.usable_bytes)
    events = _timed(recording.events)
    if row.job.accumulation == 1:
        return Steps(recording.facts, memory, events, None)
    return Steps(recording.facts, memory, without_second(events), events)


def without_second(events: tuple[StepEvent, ...]) -> tuple[StepEvent, ...]:
    """A step of two micro-batches with the second one left out: from its forward to the optimizer."""
    phases = [None if isinstance(event, Wait | Free | Gradient) else event.phase for event in events]
    backward = phases.index(StepPhase.BACKWARD)
    start = phases.index(StepPhase.FORWARD, backward)
    end = phases.index(StepPhase.OPTIMIZER, start)
    return events[:start] + events[end:]


def _recorded(row: Row, accumulation: int, folder: Path) -> Recording:
    """The row's step with so many micro-batches. What is kept of it does not depend on how memory and time are told."""
    job = replace(row.job, accumulation=accumulation)
    path = folder / f"{_key(row.build, job)}.recording"
    if path.exists():
        facts, events = pickle.loads(zlib.decompress(path.read_bytes()))
        return Recording(job, facts, events)
    recording = record(row.build, job)
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(zlib.compress(pickle.dumps((recording.facts, recording.events)), 1))
    part.rename(path)
    return recording


def _timed(events: tuple[StepEvent, ...]) -> tuple[StepEvent, ...]:
    return tuple(event for event in events if not isinstance(event, _UNTIMED))


def _key(build: Any, job: PublishedJob) -> str:
    digest = hashlib.sha256(_code())
    digest.update(repr(build).encode() if not hasattr(build, "func") else _partial(build).encode())
    # What is left at its default says nothing, so a field that is new does not make old recordings useless.
    plain: dict[str, Any] = {f.name: getattr(job, f.name) for f in fields(job) if getattr(job, f.name) != f.default}
    plain = {name: value for name, value in plain.items() if name not in _NOT_RECORDED}
    units = plain["units"]
    plain["units"] = units.__qualname__ if callable(units) else sorted(cls.__qualname__ for cls in units)
    plain["on_cpu"] = job.on_cpu
    digest.update(repr(sorted(plain.items(), key=lambda item: item[0])).encode())
    return digest.hexdigest()[:16]


def _partial(build: Any) -> str:
    return f"{build.func.__qualname__} {[_partial(a) if hasattr(a, 'func') else a for a in build.args]}"


@cache
def _code() -> bytes:
    root = Path(shardwise.__file__).parent
    files = [path for package in _PACKAGES for path in sorted((root / package).rglob("*.py"))]
    texts = [path.read_bytes() for path in files]
    texts += [
        inspect.getsource(module).encode() for module in (autocast, adapted, encoder, llama, mpt, tensor_parallel)
    ]
    return hashlib.sha256(b"".join(texts)).digest()

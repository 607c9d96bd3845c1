"""Recordings of rows, kept on disk by what they depend on: the row's inputs and the code that records."""

import hashlib
import inspect
import pickle
import zlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import shardwise
from benchmarks.published import encoder, llama, mpt
from benchmarks.published.rows import Row
from shardwise.plan.dryrun import record
from shardwise.plan.events import Collective, Event, Kernel, UnitMark, Wait
from shardwise.plan.forecast import forecast_of
from shardwise.plan.recording import Facts

_PACKAGES = ("comm", "engine", "layout", "modules", "optim", "policy", "sharded", "plan")
_LATER = (
    *("roofline", "timeline", "collectives", "hardware", "trace", "mfu", "peers", "calibrate"),
    *("evaluate", "page", "planner", "report", "scaling", "search", "space", "table", "workers", "source"),
)
"""Modules of plan/ that use recordings and do not make them."""


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
    one: tuple[Event, ...]
    """With one micro-batch."""
    two: tuple[Event, ...] | None
    """With two, where the row has more than one. Every further one repeats the second's part."""


def steps_of(row: Row, folder: Path) -> Steps:
    """From the cache, or recorded now and put there."""
    path = folder / f"{row.name}-{_key(row)}.steps"
    if path.exists():
        found: Steps = pickle.loads(zlib.decompress(path.read_bytes()))
        return found
    one = record(row.build, replace(row.job, accumulation=1))
    two = record(row.build, replace(row.job, accumulation=2)) if row.job.accumulation > 1 else None
    forecast = forecast_of(two or one)
    outside = forecast.context_bytes + forecast.nccl_bytes
    memory = Memory(forecast.peak_memory_bytes, forecast.reserved_memory_bytes, outside, forecast.usable_bytes)
    steps = Steps(one.facts, memory, _timed(one.events), None if two is None else _timed(two.events))
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zlib.compress(pickle.dumps(steps), 1))
    return steps


def _timed(events: tuple[Event, ...]) -> tuple[Event, ...]:
    return tuple(event for event in events if isinstance(event, Kernel | Collective | Wait | UnitMark))


def _key(row: Row) -> str:
    digest = hashlib.sha256(_code())
    job = row.job
    digest.update(repr(row.build).encode() if not hasattr(row.build, "func") else _partial(row.build).encode())
    plain: dict[str, Any] = {name: getattr(job, name) for name in job.__dataclass_fields__}
    plain["units"] = sorted(cls.__qualname__ for cls in plain["units"])
    plain.pop("interconnect")
    plain["gpu"] = str(job.gpu)
    digest.update(repr(sorted(plain.items(), key=lambda item: item[0])).encode())
    return digest.hexdigest()[:16]


def _partial(build: Any) -> str:
    return f"{build.func.__qualname__} {[_partial(a) if hasattr(a, 'func') else a for a in build.args]}"


@cache
def _code() -> bytes:
    root = Path(shardwise.__file__).parent
    files = [path for package in _PACKAGES for path in sorted((root / package).rglob("*.py"))]
    files = [path for path in files if not (path.parent.name == "plan" and path.stem in _LATER)]
    texts = [path.read_bytes() for path in files] + [inspect.getsource(m).encode() for m in (encoder, llama, mpt)]
    return hashlib.sha256(b"".join(texts)).digest()

"""What a profiler's trace (Chrome's format, as torch writes it) says about one step.

A kernel is known by the call that launched it: both carry one correlation number. Calls nest in time within their
thread, so a launch inside a `c10d::` operation belongs to a collective, and one inside an annotated region to that.
"""

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.accelerator.device import activities, synchronize

_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_COLLECTIVE = ("c10d::", "nccl:", "gloo:")


@dataclass(frozen=True)
class Span:
    """Something that took time on a thread of the host or a stream of the device; microseconds."""

    name: str
    start: float
    end: float
    lane: Any
    """Thread or stream."""
    correlation: int | None = None

    def holds(self, moment: float) -> bool:
        return self.start <= moment <= self.end


@dataclass(frozen=True)
class Trace:
    """Spans by kind."""

    launches: list[Span]
    """Calls of the host that gave the device something to do."""
    on_device: dict[int, Span]
    """By correlation: what they gave it."""
    regions: dict[str, Span]
    """Annotated by `record_function`, by name."""
    collectives: list[Span]

    @classmethod
    def of(cls, events: Iterable[dict[str, Any]]) -> "Trace":
        trace = cls([], {}, {}, [])
        calls: dict[int, Span] = {}
        for event in events:
            if event.get("ph") != "X":
                continue
            kind, name, arguments = event.get("cat", ""), event["name"], event.get("args", {})
            start, lane = float(event["ts"]), event.get("tid")
            correlation = arguments.get("correlation")
            if kind in _ON_DEVICE:
                lane = arguments.get("stream", lane)
            span = Span(name, start, start + float(event.get("dur", 0.0)), lane, correlation)
            if kind in _ON_DEVICE and correlation is not None:
                trace.on_device[correlation] = span
            elif kind in {"cuda_runtime", "cuda_driver", "xpu_runtime"} and correlation is not None:
                calls.setdefault(correlation, span)
            elif kind == "user_annotation":
                trace.regions[name] = span
            if kind in {"cpu_op", "user_annotation"} and name.startswith(_COLLECTIVE):
                trace.collectives.append(span)
        trace.launches.extend(call for correlation, call in calls.items() if correlation in trace.on_device)
        return trace

    @classmethod
    def load(cls, path: Path) -> "Trace":
        data = path.read_bytes()
        told = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        return cls.of(told["traceEvents"])

    @cached_property
    def _of_collectives(self) -> set[int]:
        """Correlations."""
        by_lane: dict[Any, list[Span]] = {}
        for span in self.collectives:
            by_lane.setdefault(span.lane, []).append(span)
        inside = (c for c in self.launches if any(s.holds(c.start) for s in by_lane.get(c.lane, ())))
        return {c.correlation for c in inside if c.correlation is not None}

    def launched(self, *regions: str) -> list[Span]:
        """What was launched inside these regions on any thread, collectives' own work left out."""
        return [
            launch
            for launch in self.launches
            if launch.correlation not in self._of_collectives
            and any(self.regions[name].holds(launch.start) for name in regions if name in self.regions)
        ]

    def idle_after(self, region: str) -> float | None:
        """Microseconds that the device had nothing to do between what was launched until the region's end and what was
        launched next. None where there is nothing on one side."""
        if region not in self.regions:
            return None
        border = self.regions[region].end
        before = [self._work(launch) for launch in self.launches if launch.start <= border]
        after = [self._work(launch) for launch in self.launches if launch.start > border]
        if not before or not after:
            return None
        return max(0.0, min(span.start for span in after) - max(span.end for span in before))

    def streams(self) -> Counter[Any]:
        """How much was done on each stream."""
        return Counter(span.lane for span in self.on_device.values())

    def _work(self, launch: Span) -> Span:
        assert launch.correlation is not None
        return self.on_device[launch.correlation]


def profiled(device: torch.device, action: Callable[[], object], path: Path) -> Trace:
    """Run `action` once under the profiler; its trace is at `path`, which ends in .json.gz."""
    with torch.profiler.profile(activities=activities(device)) as profiler:
        action()
        synchronize(device)
    profiler.export_chrome_trace(str(path))
    return Trace.load(path)


def spread(values: Sequence[float]) -> str:
    """The median, and the least and the most."""
    return f"{median(values):.4g} ({min(values):.4g} to {max(values):.4g})"

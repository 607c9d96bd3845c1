"""What one rank recorded: written by the rank, read by rank 0."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwise.model_tools.event_log import CollectiveCall, EventLog, HostSpan

STEP = "step"
"""`HostSpan.what` of a whole step."""
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver", "xpu_runtime"}
_COLLECTIVE_KERNELS = ("nccl", "rccl")


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """A kernel or a copy, in nanoseconds."""

    name: str
    start_ns: int
    end_ns: int
    launched_ns: int
    """When the host launched it."""
    is_copy: bool

    @property
    def is_collective(self) -> bool:
        """Whether it is a kernel of the library of collectives."""
        return self.name.lower().startswith(_COLLECTIVE_KERNELS)


@dataclass(frozen=True, slots=True)
class RankFile:
    """The contents of the file. All times are Unix time in nanoseconds by one clock: the rank's own, or after `moved`
    rank 0's."""

    rank: int
    log: EventLog
    trace: Mapping[str, Any]
    """What torch's profiler wrote, in Chrome's format. Its times are in microseconds from its base on."""
    shift_ns: int = 0
    """What is to be added to the trace's times."""
    on_device: Sequence[DeviceSpan] = field(default=())

    @classmethod
    def read(cls, path: Path, rank: int) -> RankFile:
        """Return what a rank wrote. Raises OSError."""
        tree = json.loads(gzip.decompress(path.read_bytes()))
        spans = [HostSpan(*span) for span in tree["spans"]]
        calls = [CollectiveCall(**{**call, "ranks": tuple(call["ranks"])}) for call in tree["calls"]]
        return cls(rank, EventLog(spans, calls), tree["trace"], on_device=_on_device(tree["trace"]))

    @staticmethod
    def write(path: Path, log: EventLog, trace: Mapping[str, Any]) -> None:
        """Write what this rank recorded. Raises OSError."""
        tree = {"spans": log.spans, "calls": [asdict(call) for call in log.calls], "trace": trace}
        path.write_bytes(gzip.compress(json.dumps(tree).encode(), compresslevel=3))

    def moved(self, offset_ns: int) -> RankFile:
        """Return the same by a clock that is ahead by so much."""
        spans = [
            one._replace(start_ns=one.start_ns + offset_ns, end_ns=one.end_ns + offset_ns) for one in self.log.spans
        ]
        calls = [
            replace(
                call,
                start_ns=call.start_ns + offset_ns,
                issued_ns=call.issued_ns + offset_ns,
                waits=[(start + offset_ns, end + offset_ns) for start, end in call.waits],
            )
            for call in self.log.calls
        ]
        on_device = [
            replace(
                one,
                start_ns=one.start_ns + offset_ns,
                end_ns=one.end_ns + offset_ns,
                launched_ns=one.launched_ns + offset_ns,
            )
            for one in self.on_device
        ]
        return replace(self, log=EventLog(spans, calls), shift_ns=self.shift_ns + offset_ns, on_device=on_device)

    @property
    def steps(self) -> list[HostSpan]:
        """The profiled steps, in order."""
        return [span for span in self.log.spans if span.what == STEP]


def base_ns(trace: Mapping[str, Any]) -> int:
    """Return the Unix time at which a trace's own times begin."""
    return int(trace.get("baseTimeNanoseconds", 0))


def _on_device(trace: Mapping[str, Any]) -> list[DeviceSpan]:
    """Return kernels and copies, each with the time of the call that launched it: both have one correlation number."""
    base = base_ns(trace)
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    launches = {
        event["args"]["correlation"]: base + int(1000 * event["ts"])
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    found = []
    for event in events:
        if event.get("cat") in _ON_DEVICE:
            start = base + int(1000 * event["ts"])
            launched = launches.get(event.get("args", {}).get("correlation"), start)
            end = start + int(1000 * event.get("dur", 0))
            found.append(DeviceSpan(event["name"], start, end, launched, event["cat"] != "kernel"))
    return sorted(found, key=lambda one: one.start_ns)

"""One trace of all ranks, in Chrome's format: what torch's profiler saw, and lanes of the engine's own events."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardwise.model_tools.event_log import ADVANCE, CLAIM, COPY
from shardwise.train.profile.rank_file import RankFile, base_ns
from shardwise.train.profile.summary import PHASES, innermost

_OF_A_RANK = 1000
"""Process numbers of each rank: the engine's, and one for each process and device of the rank's own trace."""
_LANES = ("run", "units", "waiting", "copies", "gathers", "reductions", "other collectives")
_ROOM = 100
"""Lanes for collectives of one kind that are under way at once: spans of one lane may not cross."""
_GATHERS, _REDUCTIONS = {"all_gather"}, {"reduce_scatter", "all_reduce", "all_to_all"}


def write_trace(path: Path, files: Sequence[RankFile]) -> None:
    """Write the trace, compressed, as Perfetto (https://ui.perfetto.dev) reads it. Raises OSError.

    Args:
        path: the file to write; ends in .json.gz.
        files: what the ranks recorded, on one clock.
    """
    events = [event for file in files for event in (*_engines(file, _origin(files)), *_torchs(file, _origin(files)))]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    path.write_bytes(gzip.compress(text.encode(), compresslevel=5))


def _origin(files: Sequence[RankFile]) -> int:
    """Return the time at which the trace begins, since microseconds of Unix time are too long for a viewer."""
    return min(file.steps[0].start_ns for file in files)


def _engines(file: RankFile, origin_ns: int) -> Iterator[dict[str, Any]]:
    pid = _OF_A_RANK * file.rank
    yield _named("process_name", pid, 0, f"rank {file.rank}: shardwise")
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for tid, lane in enumerate(_LANES):
        yield _named("thread_name", pid, tid * _ROOM, lane)
    copying = {COPY, CLAIM, ADVANCE}
    for what, name, start, end in file.log.spans:
        if what not in PHASES:
            tid = _tid("copies" if what in copying else "run")
            yield _complete(f"{what} {name}".strip(), what, pid, tid, (start - origin_ns, end - origin_ns))
    for what, name, (start, end) in innermost(file.log.spans):
        yield _complete(f"{what} {name or 'root'}", what, pid, _tid("units"), (start - origin_ns, end - origin_ns))
    busy: dict[int, int] = {}
    for call in sorted(file.log.calls, key=lambda call: call.start_ns):
        lane = "gathers" if call.op in _GATHERS else "reductions" if call.op in _REDUCTIONS else "other collectives"
        end = max([call.issued_ns, *(end for _, end in call.waits)])
        tid = next(tid for tid in range(_tid(lane), 2**31) if busy.get(tid, 0) <= call.start_ns)
        if tid not in busy and tid != _tid(lane):
            yield _named("thread_name", pid, tid, lane)
        busy[tid] = end
        title = f"{call.op} {call.name}".strip()
        args = {"unit": call.name, "ranks": list(call.ranks), "number": call.number}
        yield {**_complete(title, call.op, pid, tid, (call.start_ns - origin_ns, end - origin_ns)), "args": args}
        for start, end in call.waits:
            span = start - origin_ns, end - origin_ns
            yield _complete(f"wait for {title}", "wait", pid, _tid("waiting"), span)


def _tid(lane: str) -> int:
    return _ROOM * _LANES.index(lane)


def _torchs(file: RankFile, origin_ns: int) -> Iterator[dict[str, Any]]:
    """Yield the events of torch's profiler, moved to the common clock and to numbers of this rank's own."""
    pids: dict[Any, int] = {}
    shift_us = (base_ns(file.trace) + file.shift_ns - origin_ns) / 1e3
    for event in file.trace["traceEvents"]:
        own = pids.setdefault(event.get("pid"), _OF_A_RANK * file.rank + 1 + len(pids))
        moved = {**event, "pid": own}
        if "ts" in event:
            moved["ts"] = event["ts"] + shift_us
        if "id" in event:  # flows from launches to kernels
            moved["id"] = f"{file.rank}/{event['id']}"
        if event.get("ph") == "M" and event.get("name") == "process_name":
            moved["args"] = {"name": f"rank {file.rank}: {event['args']['name']}"}
        if event.get("ph") == "M" and event.get("name") == "process_sort_index":
            moved["args"] = {"sort_index": own}
        yield moved


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(name: str, category: str, pid: int, tid: int, span: tuple[int, int]) -> dict[str, Any]:
    start, end = span
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
    }

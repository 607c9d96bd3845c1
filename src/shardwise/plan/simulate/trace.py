"""Writes a simulated step to a file: a trace for Perfetto (https://ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path

from shardwise.errors import PlanError
from shardwise.plan.simulate.timeline import Span, Stall, Timeline


def write_trace(timeline: Timeline, path: Path | str) -> Path:
    """Write a step's timeline. Raises PlanError if the path does not end in .json, or cannot be written."""
    path = check_format(Path(path))
    try:
        path.write_text(json.dumps(chrome_trace(timeline)), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path}: cannot be written: {error.strerror}") from error
    return path


def check_format(path: Path) -> Path:
    """Return the path. Raises PlanError for any suffix but .json."""
    if path.suffix != ".json":
        raise PlanError(f"{path}: a trace must be named .json (Perfetto, chrome://tracing); --html draws the step")
    return path


def chrome_trace(timeline: Timeline) -> dict[str, object]:
    """Return the timeline in Chrome's trace event format: a thread for each stream and one for waits, in
    microseconds."""
    threads = {stream: number for number, stream in enumerate(timeline.streams, start=1)}
    waits = len(threads) + 1
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "one rank, forecast"}},
        *(_thread_name(number, stream) for stream, number in threads.items()),
        _thread_name(waits, "waiting for communication"),
    ]
    events += [_complete(span.name, threads[span.stream], span, span.phase.value) for span in timeline.spans]
    events += [_complete(f"{stall.op} {stall.unit}", waits, stall, "exposed") for stall in timeline.stalls]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _thread_name(number: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": name}}


def _complete(name: str, thread: int, what: Span | Stall, category: str) -> dict[str, object]:
    args = {"of": what.owner, "bytes": what.nbytes} if isinstance(what, Span) else {"unit": what.unit}
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": 0,
        "tid": thread,
        "ts": what.start_s * 1e6,
        "dur": (what.end_s - what.start_s) * 1e6,
        "args": args,
    }

"""Writes a simulated step to a file: a trace for Perfetto or chrome://tracing, or a drawing."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import NamedTuple

from shardwise.errors import PlanError
from shardwise.plan.dry_run.recording import StepPhase
from shardwise.plan.simulate.timeline import COMPUTE, Span, Stall, Timeline

WIDTH, LANE, LEFT, TOP = 960, 34, 110, 44
TICKS = 5
_COLOURS = {
    StepPhase.SETUP: "#8a8f98",
    StepPhase.FORWARD: "#3b7dd8",
    StepPhase.BACKWARD: "#d9772b",
    StepPhase.RECOMPUTE: "#e3b341",
    StepPhase.OPTIMIZER: "#4b9c5a",
}
_WAITING = "#d64545"


def write_trace(timeline: Timeline, path: Path | str) -> Path:
    """Write a step's timeline: `.json` for Perfetto (https://ui.perfetto.dev) or chrome://tracing, `.svg` drawn.

    Raises:
        PlanError: another suffix, or the file cannot be written.
    """
    path = check_format(Path(path))
    text = json.dumps(chrome_trace(timeline)) if path.suffix == ".json" else draw(timeline)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path}: cannot be written: {error.strerror}") from error
    return path


def check_format(path: Path) -> Path:
    """Return the path. Raises PlanError for any suffix but .json and .svg."""
    if path.suffix not in (".json", ".svg"):
        raise PlanError(f"{path}: a trace must be named .json (Perfetto, chrome://tracing) or .svg (a drawing)")
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


def draw(timeline: Timeline) -> str:
    """Return the timeline as an SVG: a lane for each stream, colours for phases, red where computation waits."""
    end_s = timeline.step_time_s or 1.0
    lanes = timeline.streams
    height = TOP + LANE * (len(lanes) + 1) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="100%" '
        f'font-family="system-ui, sans-serif" font-size="12" role="img">',
        f"<title>One step of {end_s * 1e3:.1f} ms, with {timeline.exposed_comm_s * 1e3:.1f} ms of waiting</title>",
        *_legend(),
    ]
    for number, stream in enumerate(lanes):
        spans = [span for span in timeline.spans if span.stream == stream]
        parts += _lane(number, stream, [_rectangle(span) for span in spans], end_s)
    waits = [_Rectangle("waiting", _WAITING, stall.start_s, stall.end_s) for stall in timeline.stalls]
    parts += _lane(len(lanes), "waiting", waits, end_s)
    parts += _axis(end_s, TOP + LANE * (len(lanes) + 1))
    return "\n".join([*parts, "</svg>"])


class _Rectangle(NamedTuple):
    """Consecutive spans of one colour, drawn as one: the gaps between them are too small to see."""

    label: str
    colour: str
    start_s: float
    end_s: float


def _rectangle(span: Span) -> _Rectangle:
    label = span.phase.value if span.stream == COMPUTE else f"{span.name} {span.owner}"
    return _Rectangle(label, _COLOURS[span.phase], span.start_s, span.end_s)


def _lane(number: int, name: str, blocks: list[_Rectangle], end_s: float) -> list[str]:
    y = TOP + LANE * number
    parts = [f'<text x="{LEFT - 8}" y="{y + LANE / 2 + 2}" text-anchor="end" fill="currentColor">{escape(name)}</text>']
    for block in _joined(blocks, hair_s=end_s / (WIDTH - LEFT) / 2):
        x, width = _x(block.start_s, end_s), max(_x(block.end_s, end_s) - _x(block.start_s, end_s), 0.3)
        parts.append(
            f'<rect x="{x:.2f}" y="{y + 4}" width="{width:.2f}" height="{LANE - 10}" fill="{block.colour}">'
            f"<title>{escape(block.label)}: {(block.end_s - block.start_s) * 1e3:.3f} ms</title></rect>"
        )
    return parts


def _joined(blocks: list[_Rectangle], hair_s: float) -> list[_Rectangle]:
    joined: list[_Rectangle] = []
    for block in blocks:
        last = joined[-1] if joined else None
        if last is not None and last.colour == block.colour and block.start_s - last.end_s < hair_s:
            label = last.label if last.label == block.label else last.label.split()[0]
            joined[-1] = last._replace(label=label, end_s=max(last.end_s, block.end_s))
        else:
            joined.append(block)
    return joined


def _legend() -> list[str]:
    entries = [(phase.value, colour) for phase, colour in _COLOURS.items() if phase is not StepPhase.SETUP]
    parts = []
    for number, (name, colour) in enumerate([*entries, ("waiting", _WAITING)]):
        x = LEFT + 130 * number
        parts.append(f'<rect x="{x}" y="12" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="22" fill="currentColor">{name}</text>')
    return parts


def _axis(end_s: float, y: int) -> list[str]:
    parts = [f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - 20}" y2="{y}" stroke="currentColor"/>']
    for tick in range(TICKS + 1):
        at_s = end_s * tick / TICKS
        x, anchor = (WIDTH - 4.0, "end") if tick == TICKS else (_x(at_s, end_s), "middle")  # the last label ends inside
        parts.append(
            f'<text x="{x:.1f}" y="{y + 18}" text-anchor="{anchor}" fill="currentColor">{at_s * 1e3:.4g} ms</text>'
        )
    return parts


def _x(at_s: float, end_s: float) -> float:
    return LEFT + (WIDTH - LEFT - 20) * at_s / end_s

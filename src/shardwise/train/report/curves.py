"""Curves for plotly: data and layout as plain JSON. Long ones are thinned to the least and the greatest of each bin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shardwise.pages import COLOURS
from shardwise.policy.kinds import KINDS, MEMORY_WORDS
from shardwise.train.report.run_log import RunLog

BINS = 500
"""Curves of more than twice as many points are thinned to so many bins."""
OWN, OTHER = "#3b7dd8", "#d9772b"
"""Colours of a run and of the one beside it."""


def thinned(x: Sequence[int], y: Sequence[float | None], bins: int = BINS) -> tuple[list[int], list[float | None]]:
    """Return the points of a curve, at most about three for each of so many bins: the least and the greatest value of
    each, in their order, and a gap where there is one. Every value that stands out stays."""
    if len(x) <= 2 * bins:
        return list(x), list(y)
    kept: list[int] = []
    for number in range(bins):
        inside = range(number * len(x) // bins, (number + 1) * len(x) // bins)
        values = [(value, at) for at in inside if (value := y[at]) is not None]
        gap = [at for at in inside if y[at] is None][:1]
        ends = {min(values)[1], max(values)[1]} if values else set()
        kept += sorted({*ends, *gap})
    kept = sorted({0, *kept, len(x) - 1})
    return [x[at] for at in kept], [y[at] for at in kept]


def line(run: RunLog, key: str, name: str, colour: str) -> dict[str, Any]:
    """Return the curve of one number of each step."""
    x, y = thinned(run.step_numbers, run.column(key))
    return _trace(x, y, name, colour)


def held_out(run: RunLog, name: str, colour: str) -> Iterable[dict[str, Any]]:
    """Yield the curve of the held-out loss, if there is one."""
    found = [(row["step"], row["loss"]) for row in run.evaluations if row.get("loss") is not None]
    if found:
        x, y = zip(*found, strict=True)
        marks = {"mode": "lines+markers", "line": {"color": colour, "width": 1, "dash": "dot"}}
        yield _trace(list(x), list(y), name, colour) | marks


def memory(run: RunLog) -> list[dict[str, Any]]:
    """Return areas of rank 0's bytes by kind, one on the other. Each is the highest so far, so that the last step of a
    bin has the greatest of it."""
    count = len(run.steps)
    ends = sorted({(number + 1) * count // BINS - 1 for number in range(BINS)} - {-1}) if count > BINS else range(count)
    rows = [run.steps[at] for at in ends]
    found = []
    for kind in KINDS:
        sizes = [row["memory"].get(kind) for row in rows]
        if any(sizes):
            area = {"stackgroup": "kinds", "line": {"width": 0}, "fillcolor": COLOURS[kind]}
            mib = [None if size is None else size / 2**20 for size in sizes]
            found.append(_trace([row["step"] for row in rows], mib, MEMORY_WORDS[kind], COLOURS[kind]) | area)
    return found


def chart(
    id_: str, title: str, y_title: str, traces: Sequence[dict[str, Any]], log: bool = False
) -> dict[str, Any] | None:
    """Return a chart for the page's template; None if nothing is to be drawn."""
    drawn = [trace for trace in traces if any(value is not None for value in trace["y"])]
    if not drawn:
        return None
    layout = {
        "yaxis": {"title": {"text": y_title}, "type": "log" if log else "linear"},
        "xaxis": {"title": {"text": "step"}},
    }
    return {"id": id_, "title": title, "data": drawn, "layout": layout}


def _trace(x: list[int], y: list[float | None], name: str, colour: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines" if len(x) > 1 else "markers",
        "x": x,
        "y": [None if value is None else float(f"{value:.6g}") for value in y],
        "name": name,
        "line": {"color": colour, "width": 1.5},
        "marker": {"color": colour},
    }

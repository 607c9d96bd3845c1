"""Curves as still pictures (SVG), which a browser shows at once. plotly.js takes a second to start, and is started when
a reader first points at a curve."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

_WIDTH, _HEIGHT = 560, 272
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 534, 26, 236
"""The picture, and the box in it that axes enclose."""
_TICKS = 5

Points = list[tuple[float, float | None]]


class _Axis(NamedTuple):
    """Values from `low` to `high`, laid along the box from `start` to `end`. A logarithmic axis has logarithms."""

    low: float
    high: float
    start: int
    end: int
    is_log: bool

    @classmethod
    def over(cls, values: Sequence[float], start: int, end: int, is_log: bool = False) -> _Axis:
        low, high = min(values), max(values)
        margin = 0.04 * (high - low) if start > end else 0.0  # above and below curves
        if low == high:
            margin = abs(low) * 0.1 or 0.5
        return cls(low - margin, high + margin, start, end, is_log)

    def at(self, value: float) -> float:
        """Return where a value lies, in the picture."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield places of round values, and these as text."""
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / _TICKS))
        step *= next(times for times in (1, 2, 5, 10) if (self.high - self.low) / (times * step) <= _TICKS)
        if self.is_log:
            step = max(1.0, round(step)) if self.high - self.low >= 1 else step
        for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1):
            value = number * step
            yield self.at(value), f"{10**value:.3g}" if self.is_log else _number(value, step)


def picture(chart: Mapping[str, Any]) -> str:
    """Return a chart of `curves.chart` as SVG."""
    traces, layout = chart["data"], chart["layout"]
    is_log = layout["yaxis"]["type"] == "log"
    drawn = [_points(trace, is_log) for trace in traces]
    stacks = any("stackgroup" in trace for trace in traces)
    if stacks:
        drawn = [*_stacked(drawn)]
    flat = [(x, y) for points in drawn for x, y in points if y is not None]
    if not flat:
        return ""
    across = _Axis.over([x for x, _ in flat], _LEFT, _RIGHT)
    up = _Axis.over([y for _, y in flat] + [0.0] * stacks, _BOTTOM, _TOP, is_log)
    parts = [*_axes(across, up, layout)]
    for trace, points in reversed([*zip(traces, drawn, strict=True)]) if stacks else zip(traces, drawn, strict=True):
        parts += _curve(trace, points, across, up)
    if len(traces) > 1 and not stacks:
        parts += _names(traces)
    body = "".join(parts)
    title = escape(chart["title"])
    return f'<svg class="still" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">{body}</svg>'


def _points(trace: Mapping[str, Any], is_log: bool) -> Points:
    def shown(value: float | None) -> float | None:
        if value is None or not math.isfinite(value) or (is_log and value <= 0):
            return None
        return math.log10(value) if is_log else value

    return [(x, shown(y)) for x, y in zip(trace["x"], trace["y"], strict=True)]


def _stacked(drawn: Sequence[Points]) -> Iterator[Points]:
    """Yield the upper edges of areas that lie one on the other."""
    sums: dict[float, float] = {}
    for points in drawn:
        for x, y in points:
            sums[x] = sums.get(x, 0.0) + (y or 0.0)
        yield [(x, sums[x]) for x, _ in points]


def _axes(across: _Axis, up: _Axis, layout: Mapping[str, Any]) -> Iterator[str]:
    for y, text in up.ticks():
        yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>'
        yield f'<text class="end" x="{_LEFT - 6}" y="{y + 4:.1f}">{text}</text>'
    for x, text in across.ticks():
        yield f'<path class="grid" d="M{x:.1f} {_TOP}V{_BOTTOM}"/>'
        yield f'<text class="mid" x="{x:.1f}" y="{_BOTTOM + 16}">{text}</text>'
    below = escape(layout["xaxis"]["title"]["text"])
    yield f'<text class="mid" x="{(_LEFT + _RIGHT) / 2}" y="{_HEIGHT - 4}">{below}</text>'
    turned = f"translate(11 {(_TOP + _BOTTOM) / 2}) rotate(-90)"
    yield f'<text class="mid" transform="{turned}">{escape(layout["yaxis"]["title"]["text"])}</text>'


def _curve(trace: Mapping[str, Any], points: Points, across: _Axis, up: _Axis) -> Iterator[str]:
    line = trace["line"]
    places = [None if y is None else f"{across.at(x):.1f} {up.at(y):.1f}" for x, y in points]
    if "stackgroup" in trace:
        left, right = across.at(points[0][0]), across.at(points[-1][0])
        edge = "L".join(place for place in places if place is not None)
        ground = f"{up.at(0.0):.1f}"
        yield f'<path d="M{left:.1f} {ground}L{edge}L{right:.1f} {ground}Z" fill="{trace["fillcolor"]}"/>'
        return
    if "lines" in trace["mode"]:
        steps = " ".join(
            f"{'L' if at and places[at - 1] is not None else 'M'}{place}" for at, place in enumerate(places) if place
        )
        dots = ' stroke-dasharray="2 3"' if line.get("dash") else ""
        yield f'<path class="line" d="{steps}" stroke="{line["color"]}" stroke-width="{line["width"]}"{dots}/>'
    if "markers" in trace["mode"]:
        for x, y in points:
            if y is not None:
                yield f'<circle cx="{across.at(x):.1f}" cy="{up.at(y):.1f}" r="3" fill="{line["color"]}"/>'


def _names(traces: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    x = float(_LEFT)
    for trace in traces:
        yield f'<path class="line" d="M{x:.0f} 12h16" stroke="{trace["line"]["color"]}" stroke-width="2"/>'
        yield f'<text x="{x + 20:.0f}" y="16">{escape(trace["name"])}</text>'
        x += 34 + 6.5 * len(trace["name"])


def _number(value: float, step: float) -> str:
    """Return a value as text, as exact as the steps between ticks are."""
    if value and not 1e-3 <= abs(step) < 1e5:
        return f"{value:.3g}"
    return f"{value:,.{max(0, -math.floor(math.log10(step)))}f}"

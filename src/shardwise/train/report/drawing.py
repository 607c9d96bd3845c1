"""Curves as still pictures (SVG), which a browser shows at once. plotly.js takes a second to start, and is started when
a reader first points at a curve."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

_WIDTH, _HEIGHT = 500, 272
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 478, 26, 236
"""The picture, and the box in it that axes enclose. On a phone it is drawn at two thirds, so it is no wider."""
_NAMES_LEFT = 20
_TICKS = 5
_DECADES = 2
"""A logarithmic axis shorter than this has ticks between powers of ten."""
_LETTER, _LINE = 6.5, 16
"""A letter's width and a line's height."""

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
        if not self.is_log:
            yield from ((self.at(value), text) for value, text in _round_values(self.low, self.high))
        elif self.high - self.low >= _DECADES:
            for value, _ in _round_values(self.low, self.high, least=1):
                yield self.at(value), f"{10**value:.3g}"
        else:
            low, high = 10**self.low, 10**self.high
            powers = range(math.floor(self.low), math.ceil(self.high))
            values = [times * 10.0**power for power in powers for times in (1, 2, 5)]
            found = [(value, f"{value:.3g}") for value in values if low <= value <= high]
            for value, text in found if len(found) > 2 else _round_values(low, high):
                yield self.at(math.log10(value)), text


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
    names = _names(traces) if len(traces) > 1 and not stacks else []
    top = max([_TOP, *(y + 10 for _, y, _ in names)])
    up = _Axis.over([y for _, y in flat] + [0.0] * stacks, _BOTTOM, top, is_log)
    parts = [*_axes(across, up, layout)]
    for trace, points in reversed([*zip(traces, drawn, strict=True)]) if stacks else zip(traces, drawn, strict=True):
        parts += _curve(trace, points, across, up)
    for x, y, trace in names:
        parts += _marks(trace, [f"{at:.0f} {y - 4}" for at in (x, x + 16)], [f"{x + 8:.0f} {y - 4}"])
        parts.append(f'<text class="name" x="{x + 20:.0f}" y="{y}">{escape(trace["name"])}</text>')
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
        yield f'<path class="grid" d="M{x:.1f} {up.end}V{_BOTTOM}"/>'
        yield f'<text class="mid" x="{x:.1f}" y="{_BOTTOM + 16}">{text}</text>'
    below = escape(layout["xaxis"]["title"]["text"])
    yield f'<text class="mid" x="{(_LEFT + _RIGHT) / 2}" y="{_HEIGHT - 4}">{below}</text>'
    turned = f"translate(11 {(up.end + _BOTTOM) / 2}) rotate(-90)"
    yield f'<text class="mid" transform="{turned}">{escape(layout["yaxis"]["title"]["text"])}</text>'


def _curve(trace: Mapping[str, Any], points: Points, across: _Axis, up: _Axis) -> Iterator[str]:
    places = [None if y is None else f"{across.at(x):.1f} {up.at(y):.1f}" for x, y in points]
    if "stackgroup" in trace:
        left, right = across.at(points[0][0]), across.at(points[-1][0])
        edge = "L".join(place for place in places if place is not None)
        ground = f"{up.at(0.0):.1f}"
        yield f'<path d="M{left:.1f} {ground}L{edge}L{right:.1f} {ground}Z" fill="{trace["fillcolor"]}"/>'
        return
    yield from _marks(trace, places, [place for place in places if place is not None])


def _marks(trace: Mapping[str, Any], places: Sequence[str | None], marked: Sequence[str]) -> Iterator[str]:
    """Yield a curve's line through places, broken at None, and its markers, as far as it has them."""
    line = trace["line"]
    if "lines" in trace["mode"]:
        steps = " ".join(
            f"{'L' if at and places[at - 1] is not None else 'M'}{place}" for at, place in enumerate(places) if place
        )
        dots = ' stroke-dasharray="2 3"' if line.get("dash") else ""
        yield f'<path class="line" d="{steps}" stroke="{line["color"]}" stroke-width="{line["width"]}"{dots}/>'
    if "markers" in trace["mode"]:
        for place in marked:
            x, y = place.split()
            yield f'<circle cx="{x}" cy="{y}" r="3" fill="{line["color"]}"/>'


def _names(traces: Sequence[Mapping[str, Any]]) -> list[tuple[float, int, Mapping[str, Any]]]:
    """Return where the name of each curve begins (x, y), in as many lines as the picture's width needs."""
    placed, x, y = [], float(_NAMES_LEFT), _LINE
    for trace in traces:
        width = 20 + _LETTER * len(trace["name"])
        if x > _NAMES_LEFT and x + width > _WIDTH:
            x, y = float(_NAMES_LEFT), y + _LINE
        placed.append((x, y, trace))
        x += width + 14
    return placed


def _round_values(low: float, high: float, least: float = 0.0) -> list[tuple[float, str]]:
    """Return round values from low to high, `least` apart or more, and each as text."""
    step = 10.0 ** math.floor(math.log10((high - low) / _TICKS))
    step *= next(times for times in (1, 2, 5, 10) if (high - low) / (times * step) <= _TICKS)
    step = max(step, least)
    numbers = range(math.ceil(low / step), math.floor(high / step) + 1)
    return [(number * step, _number(number * step, step)) for number in numbers]


def _number(value: float, step: float) -> str:
    """Return a value as text, as exact as the steps between ticks are."""
    exact = math.floor(math.log10(step) + 1e-9)  # the power of ten of the step, which may be 0.999... of one
    if value and not 1e-3 <= step < 1e5:
        return f"{value:.{max(3, math.floor(math.log10(abs(value)) + 1e-9) - exact + 1)}g}"
    return f"{value:,.{max(0, -exact)}f}"

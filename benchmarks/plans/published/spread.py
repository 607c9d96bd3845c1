"""Where published throughputs lie, as parts of their forecasts: what a plan shows as the range of a figure.

`python benchmarks planner --spread` writes the table that plans use, `shardwise/plan/hardware/data/spread.toml`,
from the forecasts in `benchmarks/results`, the newest of each row.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import shardwise
from benchmarks.plans.published.rows import Row
from benchmarks.plans.published.score import Scored, merge
from shardwise.plan.hardware.spread import OTHERS

TABLE = Path(shardwise.__file__).parent / "plan" / "hardware" / "data" / "spread.toml"
SHARE = 0.9
"""Of the rows of a device that its range holds, as many being above it as below."""
ENOUGH_ROWS = 8
"""That a device needs for a range of its own."""


@dataclass(frozen=True, eq=False)
class Seen:
    """A published throughput beside its forecast."""

    device: str
    source: str
    part: float
    """Published / forecast."""


@dataclass(frozen=True)
class Range:
    """Of `Seen.part`; 1 is within."""

    low: float
    high: float
    rows: int

    def __contains__(self, part: object) -> bool:
        return isinstance(part, float) and self.low <= part <= self.high


def seen(rows: Iterable[Row], tokens_per_s: Callable[[Row], float | None]) -> list[Seen]:
    """Scored rows that have a forecast, those of equal inputs merged."""
    devices: dict[str, str] = {}
    scored = []
    for row in rows:
        forecast = tokens_per_s(row) if row.scored("throughput") else None
        if forecast is not None:
            devices[row.name] = str(row.job.gpu)
            published = row.published["tokens_per_s_per_gpu"]
            scored.append(((*row.inputs, row.job.gpu), Scored(row.source, row.name, published, forecast)))
    return [Seen(devices[one.name.split("+")[0]], one.source, one.published / one.forecast) for one in merge(scored)]


def newest(results: Path) -> dict[str, float]:
    """Forecast tokens a second by row, from the results of `--out planner`, the latest date's."""
    found: dict[str, float] = {}
    for file in sorted(results.glob("*-planner.json")):
        found |= {row["id"]: row["tokens_per_s_per_gpu"] for row in json.loads(file.read_text())["rows"]}
    return found


def ranges(of: Iterable[Seen]) -> dict[str, Range]:
    """By device with enough rows; `OTHERS` holds the same share of all rows, each device weighing the same."""
    by_device: dict[str, list[float]] = defaultdict(list)
    for one in of:
        by_device[one.device].append(one.part)
    everything = [(part, 1 / len(parts)) for parts in by_device.values() for part in parts]
    found = {OTHERS: _range(everything)}
    for device, parts in sorted(by_device.items()):
        if len(parts) >= ENOUGH_ROWS:
            found[device] = _range([(part, 1.0) for part in parts])
    return found


def _range(weighted: list[tuple[float, float]]) -> Range:
    beyond = (1 - SHARE) / 2
    low, high = _quantile(weighted, beyond), _quantile(weighted, 1 - beyond)
    return Range(min(low, 1.0), max(high, 1.0), len(weighted))


def _quantile(weighted: list[tuple[float, float]], share: float) -> float:
    """The smallest value that so much of the weight does not exceed."""
    ordered = sorted(weighted)
    reached = accumulate(weight for _, weight in ordered)
    enough = share * sum(weight for _, weight in ordered) - 1e-9
    return next(value for (value, _), sum_ in zip(ordered, reached, strict=True) if sum_ >= enough)


def held(of: list[Seen], apart: Callable[[Seen], object]) -> list[Seen]:
    """The rows within the range that their device has without them and all that are `apart` with them."""
    inside: list[Seen] = []
    for key in {apart(one) for one in of}:
        known = ranges(one for one in of if apart(one) != key)
        inside += [one for one in of if apart(one) == key and one.part in (known.get(one.device) or known[OTHERS])]
    return inside


def range_lines(of: list[Seen]) -> list[str]:
    """The ranges, and how many rows they hold that had no say in them."""
    if len({one.source for one in of}) < 2:
        return ["ranges: too few sources"]
    lines = [f"ranges: published / forecast throughput, {SHARE:.0%} of a device's rows", "| device | n | from | to |"]
    lines += ["|---|---|---|---|"]
    lines += [
        f"| {name} | {range_.rows} | {range_.low:.3f} | {range_.high:.3f} |" for name, range_ in ranges(of).items()
    ]
    ways: dict[str, Callable[[Seen], object]] = {
        "row": id,
        "source": lambda one: one.source,
        "device": lambda one: one.device,
    }
    for name, apart in ways.items():
        if len({apart(one) for one in of}) == 1:
            continue  # nothing is left without it
        inside = held(of, apart)
        sources = {one.source: [other in inside for other in of if other.source == one.source] for one in of}
        by_source = ", ".join(f"{source} {sum(of_it)} of {len(of_it)}" for source, of_it in sorted(sources.items()))
        lines.append(f"within the range made without their {name}: {len(inside) / len(of):.0%} of rows ({by_source})")
    return lines


def write_table(of: list[Seen], sources: str) -> None:
    """What plans read. `sources`: where measurements and forecasts are from."""
    lines = [
        "# Written by `python benchmarks planner --spread`. Published / forecast throughput by device: between",
        f"# low and high lay {SHARE:.0%} of the runs. The forecast itself (1.0) is always within.",
        f"share = {SHARE}",
        f"source = {json.dumps(sources)}",
        "",
        "[devices]",
    ]
    for name, one in ranges(of).items():
        lines.append(f"{name} = {{ low = {one.low:.3f}, high = {one.high:.3f}, runs = {one.rows} }}")
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")

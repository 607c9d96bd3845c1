"""Errors of forecasts as `benchmarks/data/README.md` wants them counted."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

ENOUGH_ROWS = 3
"""That a source needs to have a say in the headline."""


@dataclass(frozen=True)
class Scored:
    """One merged row."""

    source: str
    name: str
    published: float
    forecast: float
    spread: float = 0.0
    """Of merged rows: (largest - smallest) / median of what was published."""
    merged: int = 1

    @property
    def error(self) -> float:
        """|forecast - published| / published."""
        return abs(self.forecast - self.published) / self.published

    @property
    def signed(self) -> float:
        """(forecast - published) / published."""
        return (self.forecast - self.published) / self.published


def merge(rows: Iterable[tuple[tuple[object, ...], Scored]]) -> list[Scored]:
    """Rows of equal inputs as one, of the median of what was published."""
    groups: dict[tuple[object, ...], list[Scored]] = defaultdict(list)
    for inputs, row in rows:
        groups[inputs].append(row)
    return [_merged(group) for group in groups.values()]


def _merged(group: list[Scored]) -> Scored:
    middle = median(row.published for row in group)
    spread = (max(row.published for row in group) - min(row.published for row in group)) / middle
    name = "+".join([group[0].name, *(row.name.rsplit("-", 1)[-1] for row in group[1:])])
    return Scored(group[0].source, name, middle, median(row.forecast for row in group), spread, len(group))


def by_source(rows: Iterable[Scored]) -> dict[str, list[Scored]]:
    """Rows of each source."""
    sources: dict[str, list[Scored]] = defaultdict(list)
    for row in rows:
        sources[row.source].append(row)
    return dict(sources)


def headline(rows: Iterable[Scored]) -> float | None:
    """Median over sources with enough rows of a source's median error; None without such a source."""
    medians = [median(r.error for r in of) for of in by_source(rows).values() if len(of) >= ENOUGH_ROWS]
    return median(medians) if medians else None


def percentile(rows: Iterable[Scored], share: float) -> float:
    """The error that `share` of the rows stay within, each source weighing the same."""
    sources = by_source(rows)
    weighted = sorted((row.error, 1 / len(of) / len(sources)) for of in sources.values() for row in of)
    reached = 0.0
    for error, weight in weighted:
        reached += weight
        if reached >= share - 1e-9:
            return error
    return weighted[-1][0]


def quantiles(values: Iterable[float], shares: Iterable[float]) -> list[float]:
    """Order statistics: the smallest value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return [
        ordered[min(len(ordered) - 1, max(0, -(-int(share * len(ordered) * 1000) // 1000) - 1))] for share in shares
    ]

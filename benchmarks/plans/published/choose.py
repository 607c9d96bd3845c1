"""The five efficiency constants, chosen for all rows at once, and what a source loses that has no say in the choice."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from benchmarks.plans.published.bundles import bundled
from benchmarks.plans.published.recordings import Steps
from benchmarks.plans.published.rows import Row
from benchmarks.plans.published.timing import time_row
from shardwise.plan.simulate.roofline import Efficiency

GRID: Mapping[str, Sequence[float]] = {
    "matmul": (0.75, 0.8, 0.85, 0.9, 0.95, 1.0),
    "attention": (0.7, 0.8, 0.9, 1.0, 1.1),
    "memory": (0.6, 0.7, 0.8, 0.9, 1.0),
    "links": (0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    "fusion": (0.2, 0.3, 0.4, 0.5, 0.6, 0.8),
}
"""Values that are tried of each."""


@dataclass(frozen=True)
class Case:
    """A row that has a say."""

    row: Row
    steps: Steps
    published: float

    def log_error(self, efficiency: Efficiency) -> float:
        """|log(forecast / published)|."""
        return abs(math.log(time_row(self.row, self.steps, efficiency).tokens_per_s(self.row) / self.published))


class Choice:
    """Coordinate descent over `GRID`, from the middle of it; every source weighs the same."""

    def __init__(self, cases: Iterable[Case]) -> None:
        self._cases = [replace(case, steps=_bundled(case.steps)) for case in cases]
        self._sources = sorted({case.row.source for case in self._cases})
        self._known: dict[Efficiency, list[float]] = {}

    def best(self, without: str | None = None) -> Efficiency:
        """The constants of least loss over all sources but one."""
        chosen = Efficiency(**{name: values[len(values) // 2] for name, values in GRID.items()})
        while True:
            before = chosen
            for name, values in GRID.items():
                tried = [replace(chosen, **{name: value}) for value in values]
                chosen = min(tried, key=lambda efficiency: self.loss(efficiency, without))
            if chosen == before:
                return chosen

    def loss(self, efficiency: Efficiency, without: str | None = None) -> float:
        """Mean of the sources' median errors, and 0.3 of the 90th percentile; sources weigh the same."""
        sources = [source for source in self._sources if source != without]
        errors = {source: self.errors(source, efficiency) for source in sources}
        weighted = sorted((error, 1 / len(of)) for of in errors.values() for error in of)
        reached = itertools.accumulate(weight for _, weight in weighted)
        tail = next(
            error for (error, _), sum_ in zip(weighted, reached, strict=True) if sum_ >= 0.9 * len(sources) - 1e-9
        )
        return fmean(median(of) for of in errors.values()) + 0.3 * tail

    def errors(self, source: str, efficiency: Efficiency) -> list[float]:
        """|log(forecast / published)| of a source's rows."""
        if efficiency not in self._known:
            self._known[efficiency] = [case.log_error(efficiency) for case in self._cases]
        known = zip(self._cases, self._known[efficiency], strict=True)
        return [error for case, error in known if case.row.source == source]


def _bundled(steps: Steps) -> Steps:
    return replace(steps, one=bundled(steps.one), two=None if steps.two is None else bundled(steps.two))

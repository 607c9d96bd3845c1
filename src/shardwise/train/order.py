"""Which row comes when: a seeded permutation per epoch, addressed by the number of samples drawn so far.

Nothing here knows of ranks. The n-th sample of a run is the same row at every world size, and a run that drew n samples
goes on with sample n at another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run stands in its data: the next sample to draw."""

    seed: int
    epoch: int
    sample: int
    """Samples already drawn in this epoch, over all ranks."""


@dataclass(frozen=True, slots=True)
class Order:
    """An endless sequence of rows: every epoch visits each of `rows` rows once, in its own seeded order."""

    rows: int
    seed: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError("an order needs at least one row")

    def row(self, sample: int) -> int:
        """The row of the sample-th draw since the start of the run, counted over all ranks and epochs."""
        epoch, within = divmod(sample, self.rows)
        return int(_permutation(self.rows, self.seed, epoch)[within])

    def position(self, sample: int) -> Position:
        """The place before the sample-th draw."""
        epoch, within = divmod(sample, self.rows)
        return Position(self.seed, epoch, within)

    def sample(self, position: Position) -> int:
        """The inverse of `position`.

        Raises:
            ValueError: the position belongs to another seed or to data with fewer samples an epoch.
        """
        if position.seed != self.seed or position.sample >= self.rows:
            raise ValueError(f"{position} is no place in {self}")
        return position.epoch * self.rows + position.sample


@lru_cache(maxsize=4)
def _permutation(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(rows)
